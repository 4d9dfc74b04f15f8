"""Tuned lens: affine maps from each layer's residual to the last; penalties by held-out texts."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.models.device import exact, where_exact
from rlhf_lab.probes.value_lens import flatten_positions

# ridge penalties to choose from, as fractions of the mean variance of the activations
PENALTIES = (1e-6, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 100.0)
SITES_COMPARED = 9  # most layers that have a translator, spread over the model


class Affine(NamedTuple):
    """A linear map with an intercept, in float64."""

    weight: Float[Tensor, "*site d_model out"]
    bias: Float[Tensor, "*site out"]

    def __call__(self, x: Float[Tensor, "*site n d_model"]) -> Float[Tensor, "*site n out"]:
        return x @ self.weight.to(x) + self.bias[..., None, :].to(x)


def ridge_path(
    x: Float[Tensor, "*site n d_model"],
    y: Float[Tensor, "*site n out"],
    mask: Bool[Tensor, "*site n"],
    ridges: Sequence[float],
) -> Iterator[Affine]:
    """Yield ridge regressions for each penalty, from one set of products; see `fit_ridge`."""
    x, y, weight = exact(x), exact(y), exact(mask)[..., None]
    count = weight.sum(-2, keepdim=True).clamp(min=1)
    x_mean, y_mean = ((z * weight).sum(-2, keepdim=True) / count for z in (x, y))
    moved = (x - x_mean) * weight
    gram, moment = moved.mT @ moved, moved.mT @ ((y - y_mean) * weight)
    variance = gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    for ridge in ridges:
        penalty = (ridge * variance).clamp(min=1e-12)[..., None, None]
        factor = torch.linalg.cholesky(gram + penalty * identity)
        slope = torch.cholesky_solve(moment, factor)
        yield Affine(slope, (y_mean - x_mean @ slope)[..., 0, :])


def ridge_errors(
    x: Float[Tensor, "batch pos d_model"],
    y: Float[Tensor, "batch pos out"],
    mask: Bool[Tensor, "batch pos"],
    pooled: bool = False,
    ridges: Sequence[float] = PENALTIES,
) -> Float[Tensor, "cell ridge"]:
    """Return the error of each penalty on held-out texts, as a fraction of that of y's mean.

    Fitted to the first three quarters of the sequences, each position separately or, if `pooled`,
    all together; nan if y does not vary.
    """
    fit = len(x) * 3 // 4
    (x_fit, y_fit, m_fit), (x_held, y_held, m_held) = (
        [flatten_positions(where_exact(z)[rows], pooled) for z in (x, y, mask)]
        for rows in (slice(fit), slice(fit, None))
    )
    weight, y_held = exact(m_held)[..., None], exact(y_held)
    count = weight.sum((-2, -1)).clamp(min=1)
    mean = (y_held * weight).sum(-2, keepdim=True) / count[:, None, None]
    total = ((y_held - mean).square() * weight).sum((-2, -1))
    errors = [
        ((y_held - found(exact(x_held))).square() * weight).sum((-2, -1))
        for found in ridge_path(x_fit, y_fit, m_fit, ridges)
    ]
    defined = (total > 1e-8 * count)[:, None]
    share = torch.stack(errors, 1) / total.clamp(min=1e-300)[:, None]
    return torch.where(defined, share, torch.nan).cpu()


def best_ridge(errors: Float[Tensor, "*cell ridge"], ridges: Sequence[float] = PENALTIES) -> float:
    """Return the penalty with the smallest mean error over the cells that are not nan."""
    return ridges[int(errors.flatten(0, -2).nanmean(0).nan_to_num(nan=torch.inf).argmin())]


def spread_over(n_sites: int, most: int = SITES_COMPARED) -> list[int]:
    """Return the indices of at most `most` sites, evenly spaced, with the first and the last."""
    return torch.linspace(0, n_sites - 1, min(most, n_sites)).round().long().tolist()


def fit_translator(
    x: Float[Tensor, "batch pos d_model"],
    last: Float[Tensor, "batch pos d_model"],
    mask: Bool[Tensor, "batch pos"],
    ridge: float,
) -> Affine:
    """Fit an affine map from a layer's residual to the last layer's, all positions together.

    A head that reads the last residual can then read the translated earlier layer
    (Belrose et al. 2023, "Eliciting Latent Predictions from Transformers with the Tuned Lens",
    arXiv 2303.08112; there the map is trained on the logits, here it is a ridge regression).
    """
    rows = [flatten_positions(where_exact(z), True) for z in (x, last, mask)]
    (found,) = ridge_path(*rows, (ridge,))
    return Affine(found.weight[0], found.bias[0])
