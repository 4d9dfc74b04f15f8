"""Checks of a crosscoder: what it stores, recomputed from the models and one latent at a time."""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from rlhf_lab.diffing.activation_store import ActivationStore, Model
from rlhf_lab.diffing.crosscoder import Crosscoder
from rlhf_lab.diffing.crosscoder_record import CrosscoderRecord
from rlhf_lab.identity import Check
from rlhf_lab.training.capture import capture_activations

HALF = 2**-10
"""Relative rounding of float16, in which activations are stored, twice over."""


@torch.no_grad()
def check_crosscoder(
    record: CrosscoderRecord,
    coder: Crosscoder,
    store: ActivationStore,
    models: Mapping[str, Model],
    tokens: Int[Tensor, "text seq"],
    by_tuned: Bool[Tensor, " text"] | None = None,
    seed: int = 0,
) -> list[Check]:
    """Return the checks of a record, and more that compare it with the models themselves.

    1. Scales: each model's activations have an rms of 1 after division by its stored scale.
    2. One token, of 512 that are drawn the one at which the models differ most: what the store has
       of each model is what that model, run on the text again, has; and the stored decoder times
       its latents, plus errors, is that.
    3. One living latent, drawn at random, and the one whose relative norm is furthest from 1/2: its
       stored top token, run and encoded again, has the stored value; its relative norm is that of
       what switching it on writes; its frequency and share, counted token by token; its betas, from
       the minimum of a parabola.

    Args:
        tokens: the texts that the store was shown, in that order and without padding.
        seed: of what is drawn, such as the phase.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: int(torch.randint(n, (), generator=generator))
    alive = (record.freq > 0).nonzero()[:, 0]
    if not len(alive):
        return [Check.at_most("a latent fires", torch.nan, 0)]
    furthest = int(alive[(record.rel_norm[alive] - 0.5).abs().argmax()])
    again = _Again(record, coder, models, tokens)
    checks = [
        *record.checks,
        _scales(record, store),
        *again.token(store, torch.randint(len(store), (512,), generator=generator)),
    ]
    for latent in (int(alive[draw(len(alive))]), furthest):
        checks += [
            *again.top(latent),
            _norm(record, coder, latent),
            *_counts(record, coder, store, latent, by_tuned),
            _betas(record, coder, store, latent),
        ]
    return checks


class _Again:
    """Tokens of the texts, run through the models again by the names that the record has."""

    def __init__(
        self,
        record: CrosscoderRecord,
        coder: Crosscoder,
        models: Mapping[str, Model],
        tokens: Int[Tensor, "text seq"],
    ) -> None:
        self.record, self.coder, self.models, self.tokens = record, coder, models, tokens

    def _run(self, text: int, pos: int) -> Tensor:
        """Activations `[1 model d_model]` at one token."""
        site, ids = self.record.site, self.tokens[text : text + 1, : pos + 1]
        found = [
            capture_activations(self.models[m], ids, [site], -1)[site] for m in self.record.models
        ]
        return torch.stack([x.float().cpu() for x in found], 1)

    def token(self, store: ActivationStore, rows: Int[Tensor, " row"]) -> list[Check]:
        """One kept token, of these the one at which the models differ most."""
        x = store.activations[rows].float()
        row = int(rows[(x[:, 0] - x[:, 1]).norm(dim=-1).argmax()])
        places = store.places
        x = self._run(int(places.texts[row]), int(places.positions[row]))
        off = (store.activations[row].float() - x[0]).abs().max() / x.abs().max()
        f = self.coder.encode(x)
        written = torch.einsum("l,lmd->md", f[0], self.record.decoder) + self.coder.b_dec
        written = written * self.record.scale[:, None]
        error = x - self.coder.decode(f)
        sum_off = (written + error[0] - x[0]).abs().max() / x.abs().max()
        return [
            Check.at_most("a stored token has each model's own activations", off, HALF),
            Check.at_most("stored decoders times latents, plus error, are them", sum_off, 1e-4),
        ]

    def top(self, latent: int) -> list[Check]:
        """The stored top token of one latent."""
        record = self.record
        text, pos = int(record.top_texts[latent, 0]), int(record.top_positions[latent, 0])
        value = record.top_values[latent, 0]
        if text < 0:
            return [Check.at_most("a latent that fires has a top token", torch.nan, 0)]
        found = self.coder.encode(self._run(text, pos))[0, latent]
        kept = record.top_values[latent]
        spelled = int(self.tokens[text, pos] != record.top_ids[latent, 0])
        falls = (kept[1:] - kept[:-1]).max()
        least = float(kept[0] <= 0)
        return [
            Check.at_most(
                "a latent's stored top token, encoded again", (found / value - 1).abs(), 0.02
            ),
            Check.at_most("the stored top token is the text's", spelled, 0),
            Check.at_most("top tokens fall in value", max(falls.item(), least), 0),
        ]


def _scales(record: CrosscoderRecord, store: ActivationStore) -> Check:
    rms = (store.activations.double() / record.scale.double()[:, None]).square().mean((0, 2)).sqrt()
    return Check.at_most(
        "each model has an rms of 1 by its stored scale", (rms - 1).abs().max(), 1e-3
    )


def _norm(record: CrosscoderRecord, coder: Crosscoder, latent: int) -> Check:
    """The relative norm, from what the latent writes into each model by name."""
    on = torch.zeros(1, len(record.rel_norm))
    on[0, latent] = 1.0
    written = (coder.decode(on) - coder.decode(on * 0))[0] / record.scale[:, None]
    lengths = {name: written[i].norm() for i, name in enumerate(record.models)}
    base, tuned = (lengths[name] for name in record.models)
    off = record.rel_norm[latent] - tuned / (base + tuned)
    return Check.at_most("a latent's relative norm is of what it writes", off.abs(), 1e-4)


def _counts(
    record: CrosscoderRecord,
    coder: Crosscoder,
    store: ActivationStore,
    latent: int,
    by_tuned: Bool[Tensor, " text"] | None,
) -> list[Check]:
    """Frequency, share, and the largest value of one latent, from its encoder alone."""
    value = _activations(coder, store, latent)
    fires = value > 0
    checks = [
        Check.at_most(
            "a latent's frequency", (fires.float().mean() - record.freq[latent]).abs(), 1e-4
        ),
        Check.at_most(
            "a latent's top value is its largest",
            (value.max() / record.top_values[latent, 0] - 1).abs(),
            1e-3,
        ),
    ]
    if by_tuned is not None:
        wrote = by_tuned[store.places.texts].float()
        share = (wrote * fires).sum() / fires.sum()
        off = (share - record.share_tuned[latent]).abs()
        checks.append(Check.at_most("a latent's share of the tuned model's texts", off, 1e-3))
    return checks


def _activations(coder: Crosscoder, store: ActivationStore, latent: int) -> Tensor:
    """One latent at every kept token."""
    x = store.activations.float() / coder.scale[:, None] - coder.b_dec
    f = (x * coder.W_enc[:, :, latent]).sum((1, 2)) + coder.b_enc[latent]
    size = coder.W_dec[latent].norm(dim=-1).sum()
    return torch.where(f * size > coder.threshold, f.clamp(min=0), 0.0)


def _betas(
    record: CrosscoderRecord, coder: Crosscoder, store: ActivationStore, latent: int
) -> Check:
    """The betas of one latent, from the squared errors at -1, 0 and 1 alone."""
    value = _activations(coder, store, latent)
    rows = value > 0
    f = coder.encode(store.activations[rows])
    f[:, latent] = 0.0
    x = store.activations[rows].double()
    rest = (x - coder.decode(f)) / record.scale.double()[:, None]
    step = value[rows].double()[:, None] * record.decoder[latent, 1].double()
    off = 0.0
    for model, stored in enumerate((record.nu_base, record.nu_tuned)):
        low, mid, high = (
            (rest[:, model] - b * step).square().sum().item() for b in (-1.0, 0.0, 1.0)
        )
        beta = (low - high) / (2 * (low - 2 * mid + high))
        off = max(off, abs(beta - stored[latent].item()))
    return Check.at_most("a latent's betas are least squares", off, 5e-3)
