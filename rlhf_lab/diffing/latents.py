"""Latents of a crosscoder: relative decoder norms, latent scaling, top tokens and controls."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.diffing.activation_store import ActivationStore, TokenPlaces
from rlhf_lab.diffing.crosscoder import Crosscoder
from rlhf_lab.identity import Check

ROWS = 4096  # tokens that are encoded at once
TUNED_ONLY = 0.7  # relative norm above which a latent may belong to the second model only


class LatentFiring(NamedTuple):
    """Firing of each latent on the tokens of a store.

    Args:
        freq: fraction of the tokens at which it fires.
        top: tokens at which it fires most, `[latent top]`.
        top_values: activations at these tokens.
    """

    freq: Float[Tensor, " latent"]
    top: TokenPlaces
    top_values: Float[Tensor, "latent top"]


def find_latents(coder: Crosscoder, store: ActivationStore, top: int = 8) -> LatentFiring:
    """Return how often each latent fires, and its top tokens."""
    f = torch.cat([coder.encode(rows) for rows in store.activations.split(ROWS)])
    best = f.topk(min(top, len(f)), dim=0)
    places = TokenPlaces(*(column[best.indices].T for column in store.places))
    return LatentFiring((f > 0).float().mean(0), places, best.values.T)


def relative_norms(coder: Crosscoder) -> Float[Tensor, " latent"]:
    """Compute the fraction of each latent's decoder length in the second model.

    It is 1/2 for a latent of both models, 1 for a latent of the second only.

    |d_tuned| / (|d_base| + |d_tuned|)  (Lindsey et al. 2024, "Sparse Crosscoders")
    """
    norms = coder.norms().double()
    return (norms[:, 1] / norms.sum(1)).float()


@torch.no_grad()
def latent_scaling(coder: Crosscoder, store: ActivationStore) -> Float[Tensor, "latent model"]:
    """Measure the presence of each latent in each model, along its decoder of the second model.

    The error of a model's reconstruction plus the latent's own output is regressed on the latent's
    activation times its decoder in the *second* model. A latent of both models whose decoder is in
    the second only (complete shrinkage) gets close betas; one that never fires gets 0.

    beta_m = sum_t f_t <d_tuned, eps_tm + f_t d_m> / (sum_t f_t^2 |d_tuned|^2)
    (Minder et al. 2025, arXiv 2504.02922, section 3)
    """
    left = torch.zeros(len(coder.b_enc), len(coder.scale), dtype=torch.float64)
    squares = torch.zeros(len(coder.b_enc), dtype=torch.float64)
    tuned = coder.W_dec[:, 1].double()
    for rows in store.activations.split(ROWS):
        f = coder.encode(rows)
        error = (coder.normalized(rows) - coder.decode(f) / coder.scale[:, None]).double()
        left += torch.einsum("nl,nmd,ld->lm", f.double(), error, tuned)
        squares += f.double().square().sum(0)
    left += squares[:, None] * torch.einsum("lmd,ld->lm", coder.W_dec.double(), tuned)
    sizes = (squares * tuned.square().sum(1))[:, None]
    return torch.where(sizes > 0, left / sizes, 0.0).float()


def check_crosscoder(
    coder: Crosscoder, control: Crosscoder, store: ActivationStore, k: int
) -> list[Check]:
    """Check the number of latents per token, and the norms of a control.

    The control is fitted to `store.beside_itself(...)` of the first model.
    """
    per_token = find_latents(coder, store).freq.sum()
    alive = find_latents(control, store.beside_itself(store.models[0])).freq > 0
    above = (relative_norms(control)[alive] > TUNED_ONLY).float().sum()
    return [
        Check.at_most("latents per token differ from k", abs(per_token / k - 1), 0.25),
        Check.at_most(f"control latents above {TUNED_ONLY}", above, 0),
    ]
