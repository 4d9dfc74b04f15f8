"""Value lens: the value head applied to every layer, a logit lens for value; ridge regression."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from rlhf_lab.functional import Interval, bootstrap_means, zero_masked
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.device import exact, where_exact
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.probes.probe import RESAMPLES
from rlhf_lab.rewards import RewardModel

# before the first block, and mid and post of each; parallel blocks have no mid
RESIDUAL_SITES = ("blocks.0.hook_resid_pre", "blocks.*.hook_resid_*[dt]")
LEAST_VARIANCE = 1e-12  # below, a correlation is undefined; a new value head has some 1e-6


def normalize_residual(
    model: HookedModel, residual: Float[Tensor, "*batch d_model"]
) -> Float[Tensor, "*batch d_model"]:
    """Return the values of `ln_final.hook_normalized` if this were the last residual.

    1. In float32, for LayerNorm: subtract the mean over d_model; RMSNorm: leave it.
    2. Divide by the root of (the mean square plus eps). Gain and bias come after that hook.
    3. Give the result the dtype of the residual.
    """
    x = residual.float()
    if model.cfg.normalization_type in ("LN", "LNPre"):
        x = x - x.mean(-1, keepdim=True)
    scale = (x.square().mean(-1, keepdim=True) + model.cfg.eps).sqrt()
    return (x / scale).to(residual.dtype)


@torch.no_grad()
def value_lens(
    policy: TransformerWithValueHead | RewardModel,
    residuals: Float[Tensor, "site batch seq d_model"],
) -> Float[Tensor, "site batch seq"]:
    """Read the head's estimate from each layer's residual, as if the later layers did nothing.

    v_l(s) = value_head(norm(h_l(s))), with the same point of the norm that the head reads.
    """
    return policy.value_head(normalize_residual(policy.base_model, residuals))[..., 0]


def fit_ridge(
    x: Float[Tensor, "*site n d_model"],
    y: Float[Tensor, "*site n"],
    mask: Bool[Tensor, "*site n"],
    ridge: float,
) -> tuple[Float[Tensor, "*site d_model"], Float[Tensor, "*site"]]:
    """Fit a ridge regression of y on x at each site, over the rows where the mask is True.

    1. Put 0 in the rows where the mask is False, also where x or y is nan.
    2. Subtract from x and y their means over the other rows, and put 0 in the masked rows again.
    3. Penalize by `ridge` times the mean variance of x, so `ridge` has the same meaning at every
       site.
    4. Solve the normal equations in float64 with a Cholesky factorization. The intercept is not
       penalized.

    Returns slope and intercept, in float64. If x is the same in all rows, the slope is 0 and the
    intercept the mean of y: the penalty is at least 1e-12. Do not use `torch.linalg.solve`: above
    128 columns it can hang on a CPU for a batch (pytorch/pytorch issue 142815).

    (X'X + n ridge v I) w = X'y, with n rows and v = trace(X'X) / (n d_model)
    (Hoerl and Kennard 1970)
    """
    x, y = zero_masked(x.double(), mask), zero_masked(y.double(), mask)
    count = mask.sum(-1, keepdim=True).clamp(min=1)
    x_mean, y_mean = x.sum(-2) / count, y.sum(-1, keepdim=True) / count
    x_centered = zero_masked(x - x_mean[..., None, :], mask)
    gram = x_centered.mT @ x_centered
    variance = gram.diagonal(dim1=-2, dim2=-1).sum(-1) / x.shape[-1]
    penalty = (ridge * variance).clamp(min=1e-12)[..., None, None]
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    moment = x_centered.mT @ zero_masked(y - y_mean, mask)[..., None]
    factor = torch.linalg.cholesky(gram + penalty * identity)
    slope = torch.cholesky_solve(moment, factor)[..., 0]
    return slope, y_mean[..., 0] - (slope * x_mean).sum(-1)


def flatten_positions(
    z: Shaped[Tensor, "batch pos *rest"], pooled: bool
) -> Shaped[Tensor, "site n *rest"]:
    """Return rows by position, or all positions pooled as one."""
    return z.flatten(0, 1)[None] if pooled else z.transpose(0, 1)


class HeldOutFit(NamedTuple):
    """Predictions of one site for held-out rows, their targets, and which rows count."""

    predicted: Float[Tensor, "pos n"]
    y: Float[Tensor, "pos n"]
    mask: Bool[Tensor, "pos n"]


def held_out_fits(
    residuals: Float[Tensor, "site batch seq d_model"],
    target: Float[Tensor, "batch seq"],
    mask: Bool[Tensor, "batch seq"],
    ridge: float = 1e-6,
    pooled: bool = False,
) -> list[HeldOutFit]:
    """Fit ridge regressions on the target by layer and position, and predict held-out sequences.

    Each is fitted to the first two thirds of the sequences, site by site to save memory, for each
    position or, if `pooled`, for all together.

    Raises ValueError with fewer than 4 sequences.
    """
    batch = len(target)
    if batch < 4:
        raise ValueError(f"batch is {batch}. Pass at least 4 sequences, two thirds to fit.")
    cut = 2 * batch // 3
    target, mask = where_exact(target), where_exact(mask)
    found = []
    for x in map(where_exact, residuals):
        parts = [(x[rows], target[rows], mask[rows]) for rows in (slice(cut), slice(cut, None))]
        flat = [[flatten_positions(z, pooled) for z in part] for part in parts]
        (x_fit, y_fit, kept_fit), (x_test, y_test, kept_test) = flat
        slope, intercept = fit_ridge(x_fit, y_fit, kept_fit, ridge)
        predicted = (x_test.double() @ slope[..., None])[..., 0] + intercept[..., None]
        found.append(HeldOutFit(predicted, y_test, kept_test))
    return found


def r2_interval(fits: list[HeldOutFit], sequences: int) -> Interval:
    """Return R2 of each site and position, with its bootstrap interval over held-out sequences.

    R2 is the fraction of y's variance that is predicted: below 0 for a prediction that is worse
    than the mean, nan if y does not vary. The fit is not repeated. All tokens of a sequence are
    drawn together, also if pooled.

    R2 = 1 - sum (y - predicted)^2 / sum (y - mean y)^2
    """

    def split_sequences(x: Float[Tensor, "pos n"]) -> Float[Tensor, "sequence pos"]:
        n_pos = len(x)
        return exact(x).reshape(n_pos, sequences, -1).sum(-1).T

    def r2(error: Tensor, count: Tensor, y: Tensor, square: Tensor) -> Tensor:
        total = square - y.square() / count
        return torch.where(total > 1e-8 * count, 1 - error / total, torch.nan)

    errors = [split_sequences((f.y - f.predicted).square() * f.mask) for f in fits]
    y, weight = exact(fits[0].y), exact(fits[0].mask)
    shared = [split_sequences(x)[:, None] for x in (weight, weight * y, weight * y.square())]
    return bootstrap_means(torch.stack(errors, 1), *shared, statistic=r2, resamples=RESAMPLES)


def correlation_with(
    estimate: Float[Tensor, "*rows"],
    value: Float[Tensor, "*rows"],
    mask: Bool[Tensor, "*rows"] | None = None,
    resamples: int = 2000,
) -> Interval:
    """Compute the correlation of estimates with values over sequences (axis 0), in every cell.

    It is nan if one of the two does not vary.

    Args:
        mask: True for rows that have a value; all when None.
    """
    weight = torch.ones_like(value, dtype=torch.bool) if mask is None else mask
    x, y = (exact(z).cpu().where(weight.cpu(), 0.0) for z in (estimate, value))
    weight = exact(weight).cpu()
    total = weight.sum(0).clamp(min=1)
    x, y = ((z - z.sum(0) / total) * weight for z in (x, y))  # against rounding

    def statistic(count: Tensor, *sums: Tensor) -> Tensor:
        x, y, of_x, of_y, both = (each / count.clamp(min=1e-300) for each in sums)
        spreads = of_x - x.square(), of_y - y.square()
        defined = (spreads[0] > LEAST_VARIANCE) & (spreads[1] > LEAST_VARIANCE)
        product = torch.where(defined, spreads[0] * spreads[1], 1.0)
        return torch.where(defined, (both - x * y) / product.sqrt(), torch.nan)

    moments = weight, x, y, x.square(), y.square(), x * y
    return bootstrap_means(*moments, statistic=statistic, resamples=resamples)
