"""Crosscoder record: relative decoder norms, latent scaling, top tokens and control checks."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.diffing.activation_store import ActivationStore, Model
from rlhf_lab.diffing.crosscoder import Crosscoder
from rlhf_lab.diffing.splicing import SplicedKL
from rlhf_lab.errors import ConfigError
from rlhf_lab.identity import Check
from rlhf_lab.training.checkpoint import save_checkpoint

STORED_AT_ONCE = 4096
TOP = 8
TUNED_ONLY = 0.7
"""Relative norm above which a latent is a candidate for one that only the second model has."""
SHARED = 0.3
"""Ratio of betas above which a candidate is in the first model, too."""


@dataclass(frozen=True)
class CrosscoderRecord:
    """What a crosscoder found between two models, by latent.

    Args:
        models: their names, in the order of the axis `model`; the second is the tuned one.
        site: where in them.
        k: latents per token, on average.
        scale: rms of each model's activations.
        decoder: in units of the rms.
        rel_norm: |d_tuned| / (|d_base| + |d_tuned|); nan where the latent never fires.
        freq: share of the tokens on which it fires.
        share_tuned: share of these tokens that stand in the tuned model's own texts; nan if it is
            not known who wrote what.
        nu_base, nu_tuned: how much of the latent, along its decoder in the tuned model, is in what
            the rest of the crosscoder leaves of each model's activations.
        top_ids, top_texts, top_positions, top_values: the tokens on which it fires most; -1 and 0
            where there are fewer.
        unexplained: share of each model's variance that is not reconstructed.
        latents_per_token: as measured.
        spliced_kl, ablated_kl: of each model, in nats per text: with the reconstruction in place of
            the activation, and with the mean.
        control: relative norms of a crosscoder of the first model beside itself.
        checks: of the fit and its control: the spliced KL is below 1 % of the KL of mean ablation,
            the latents per token are within 25 % of k, and no control latent has a
            relative norm above .7.
    """

    models: tuple[str, str]
    site: str
    k: int
    scale: Float[Tensor, " model"]
    decoder: Float[Tensor, "latent model d_model"]
    rel_norm: Float[Tensor, " latent"]
    freq: Float[Tensor, " latent"]
    share_tuned: Float[Tensor, " latent"]
    nu_base: Float[Tensor, " latent"]
    nu_tuned: Float[Tensor, " latent"]
    top_ids: Int[Tensor, "latent 8"]
    top_texts: Int[Tensor, "latent 8"]
    top_positions: Int[Tensor, "latent 8"]
    top_values: Float[Tensor, "latent 8"]
    unexplained: Float[Tensor, " model"]
    latents_per_token: float
    spliced_kl: Float[Tensor, " model"]
    ablated_kl: Float[Tensor, " model"]
    control: Float[Tensor, " control"]
    checks: list[Check] = field(default_factory=list)

    @property
    def candidates(self) -> Int[Tensor, " candidate"]:
        """Latents whose decoder is nearly all in the tuned model."""
        return (self.rel_norm > TUNED_ONLY).nonzero()[:, 0]

    @property
    def tuned_only(self) -> Int[Tensor, " kept"]:
        """The candidates that latent scaling does not find in the first model."""
        among = self.candidates
        return among[self.nu_base[among] / self.nu_tuned[among] < SHARED]

    def save(self, path: str | Path) -> None:
        """Write it as safetensors; raises RunError where that cannot be."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "checks"}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        notes = {name: value for name, value in values.items() if name not in tensors}
        checks = [vars(check) for check in self.checks]
        notes |= {"models": list(self.models), "checks": checks}
        save_checkpoint(Path(path), tensors, {"crosscoder": notes})


def relative_norms(coder: Crosscoder) -> Float[Tensor, " latent"]:
    """The share of each latent's decoder length that is in the second model.

    1/2 of a latent that both models have, 1 of one that only the second has.

    |d_tuned| / (|d_base| + |d_tuned|)  (Lindsey et al. 2024, "Sparse Crosscoders")
    """
    norms = coder.norms().double()
    return (norms[:, 1] / norms.sum(1)).float()


@torch.no_grad()
def latent_scaling(coder: Crosscoder, store: ActivationStore) -> Float[Tensor, "latent model"]:
    """How much of each latent there is in each model, whatever the crosscoder wrote there.

    1. Take what the crosscoder leaves of a model's activations, and add what the latent wrote: all
       that the other latents do not explain.
    2. Regress it on the latent's activation times its decoder in the *second* model.

    A latent that is really in both models, but was written in the second only, is in the first
    one's errors, and gets a beta near that of the second (complete shrinkage). 0 for a latent that
    never fires.

    beta_m = sum_t f_t <d_tuned, eps_tm + f_t d_m> / (sum_t f_t^2 |d_tuned|^2)
    (Minder et al. 2025, arXiv 2504.02922, section 3)
    """
    left = torch.zeros(len(coder.b_enc), len(coder.scale), dtype=torch.float64)
    squares = torch.zeros(len(coder.b_enc), dtype=torch.float64)
    tuned = coder.W_dec[:, 1].double()
    for rows in store.activations.split(STORED_AT_ONCE):
        f = coder.encode(rows)
        error = coder.normalized(rows) - coder.decode(f) / coder.scale[:, None]
        f = f.double()
        left += torch.einsum("nl,nmd,ld->lm", f, error.double(), tuned)
        squares += f.square().sum(0)
    own = torch.einsum("lmd,ld->lm", coder.W_dec.double(), tuned)
    sizes = squares * tuned.square().sum(1)
    there = (sizes > 0)[:, None]
    betas = (left + squares[:, None] * own) / torch.where(there, sizes[:, None], 1.0)
    return torch.where(there, betas, 0.0).float()


@torch.no_grad()
def record_crosscoder(
    coder: Crosscoder,
    store: ActivationStore,
    models: Mapping[str, Model],
    site: str,
    k: int,
    kl: SplicedKL,
    control: Crosscoder,
    by_tuned: Bool[Tensor, " text"] | None = None,
) -> CrosscoderRecord:
    """Record the latents of a crosscoder, with checks of its fit and its control.

    Args:
        kl: of both models on some texts, from `spliced_kl`.
        control: fitted to `store.beside_itself(...)`: what is tuned-only there is none.
        by_tuned: of each text that the store was shown, whether the second model wrote it.

    Raises:
        ConfigError: `by_tuned` has another number of texts than the store was shown.
    """
    if by_tuned is not None and len(by_tuned) != store.n_texts:
        raise ConfigError(
            f"by_tuned has {len(by_tuned)} texts, but the store was shown {store.n_texts}; give "
            "one entry for each."
        )
    places = store.places
    n, latents = len(store), len(coder.b_enc)
    fires, by_second = torch.zeros(latents), torch.zeros(latents)
    errors = torch.zeros(2, dtype=torch.float64)
    best = torch.zeros(0, latents), torch.zeros(0, latents, dtype=torch.long)
    for rows in torch.arange(n).split(STORED_AT_ONCE):
        x = store.activations[rows]
        f = coder.encode(x)
        fires += (f > 0).sum(0)
        if by_tuned is not None:
            by_second += (f > 0)[by_tuned[places.texts[rows]]].sum(0)
        left = (x.float() - coder.decode(f)) / coder.scale[:, None]
        errors += left.double().square().sum((0, 2))
        both = torch.cat([best[0], f]), torch.cat([best[1], rows[:, None].expand_as(f)])
        top = both[0].topk(min(TOP, len(both[0])), dim=0)
        best = top.values, both[1].gather(0, top.indices)
    values, found = (_to_width(x.T, TOP) for x in best)
    alive, nu = fires > 0, latent_scaling(coder, store)
    x = coder.normalized(store.activations).double()
    variance = (x - x.mean(0)).square().sum((0, 2))
    missing = torch.where(values > 0, 0, 1).bool()
    look_up = lambda column: column[found].masked_fill(missing, -1)
    unknown = torch.full_like(fires, torch.nan)
    per_token = (fires.sum() / n).item()
    control_norms = relative_norms(control)[control_alive(control, store, 0)]
    return CrosscoderRecord(
        models=tuple(store.models),
        site=site,
        k=k,
        scale=coder.scale.clone(),
        decoder=coder.W_dec.detach().clone(),
        rel_norm=relative_norms(coder).masked_fill(~alive, torch.nan),
        freq=fires / n,
        share_tuned=unknown if by_tuned is None else by_second / fires,
        nu_base=nu[:, 0].contiguous(),
        nu_tuned=nu[:, 1].contiguous(),
        top_ids=look_up(places.ids),
        top_texts=look_up(places.texts),
        top_positions=look_up(places.positions),
        top_values=values.contiguous(),
        unexplained=(errors / variance).float(),
        latents_per_token=per_token,
        spliced_kl=kl.spliced,
        ablated_kl=kl.ablated,
        control=control_norms,
        checks=_control_checks(k, per_token, kl, control_norms),
    )


def _control_checks(
    k: int, per_token: float, kl: SplicedKL, control: Float[Tensor, " control"]
) -> list[Check]:
    above = (control > TUNED_ONLY).sum().item() if len(control) else torch.nan
    ratio = (kl.spliced / kl.ablated).max()
    return [
        Check.at_most("spliced KL relative to mean ablation", ratio, 0.01),
        Check.at_most("latents per token differ from k", abs(per_token / k - 1), 0.25),
        Check.at_most(f"control latents above {TUNED_ONLY}", above, 0),
    ]


def control_alive(
    control: Crosscoder, store: ActivationStore, model: int
) -> Bool[Tensor, " latent"]:
    """Which latents of a base/base control fire on what the store keeps of that model."""
    fires = torch.zeros(len(control.b_enc), dtype=torch.bool)
    for rows in store.activations[:, [model] * 2].split(STORED_AT_ONCE):
        fires |= (control.encode(rows) > 0).any(0)
    return fires


def _to_width(x: Tensor, width: int) -> Tensor:
    """Columns of zeros at the end, up to a width."""
    return torch.cat([x, x.new_zeros(len(x), width - x.shape[1])], 1)
