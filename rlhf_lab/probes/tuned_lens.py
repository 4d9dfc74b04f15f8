"""Tuned lens: affine maps from each layer's residual to the last; penalties by held-out texts."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.models.device import exact, where_exact
from rlhf_lab.probes.value_lens import HeldOutFit, r2_interval

# ridge penalties to choose from, as fractions of the mean variance of the activations
PENALTIES = (1e-6, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 100.0)
SITES_COMPARED = 9  # most layers that have a translator, spread over the model


class Affine(NamedTuple):
    """A linear map with an intercept, in float64."""

    weight: Float[Tensor, "d_model out"]
    bias: Float[Tensor, " out"]

    def __call__(self, x: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n out"]:
        return x @ self.weight.to(x) + self.bias.to(x)


def fit_translator(
    x: Float[Tensor, "batch pos d_model"],
    last: Float[Tensor, "batch pos d_model"],
    mask: Bool[Tensor, "batch pos"],
    ridge: float,
) -> Affine:
    """Fit an affine map from a layer's residual to the last layer's, all positions together.

    A head that reads the last residual can then read the translated earlier layer
    (Belrose et al. 2023, "Eliciting Latent Predictions from Transformers with the Tuned Lens",
    arXiv 2303.08112; there the map is trained on the logits, here it is a ridge regression, with
    the penalty of `fit_ridge`).
    """
    x, last, weight = (exact(where_exact(z)).flatten(0, 1) for z in (x, last, mask[..., None]))
    count = weight.sum().clamp(min=1)
    x_mean, last_mean = ((z * weight).sum(0) / count for z in (x, last))
    moved = (x - x_mean) * weight
    gram = moved.T @ moved
    gram.diagonal().add_((ridge * gram.diagonal().mean()).clamp(min=1e-12))
    slope = torch.cholesky_solve(moved.T @ (last - last_mean), torch.linalg.cholesky(gram))
    return Affine(slope, last_mean - x_mean @ slope)


def held_out_translation(
    x: Float[Tensor, "batch pos d_model"],
    last: Float[Tensor, "batch pos d_model"],
    mask: Bool[Tensor, "batch pos"],
    ridge: float,
) -> HeldOutFit:
    """Predict each dimension of the last residual in the last third of the sequences."""
    cut = 2 * len(x) // 3
    translate = fit_translator(x[:cut], last[:cut], mask[:cut], ridge)
    by_dimension = lambda z: exact(where_exact(z)).flatten(0, 1).T
    y, weight = by_dimension(last[cut:]), where_exact(mask)[cut:].flatten()
    return HeldOutFit(by_dimension(translate(exact(where_exact(x[cut:])))), y, weight.expand_as(y))


def best_ridge(fit: Callable[[float], list[HeldOutFit]]) -> float:
    """Return the penalty with the highest mean R2 on held-out sequences, over cells that vary."""
    # as one sequence, which has no interval to sample
    means = [r2_interval(fit(ridge), 1).value.nanmean() for ridge in PENALTIES]
    return PENALTIES[int(torch.stack(means).nan_to_num(nan=-torch.inf).argmax())]


def spread_over(n_sites: int, most: int = SITES_COMPARED) -> list[int]:
    """Return the indices of at most `most` sites, evenly spaced, with the first and the last."""
    return torch.linspace(0, n_sites - 1, min(most, n_sites)).round().long().tolist()
