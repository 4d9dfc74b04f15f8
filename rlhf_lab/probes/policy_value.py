"""Value of a prefix from the policy's own continuations, and the correlation of two values."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import Interval, bootstrap_means
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.device import exact
from rlhf_lab.samples import Samples
from rlhf_lab.sampling import sample
from rlhf_lab.sampling_spec import SamplingSpec

ROWS_TOGETHER = 256  # continuations sampled at a time
LEAST_VARIANCE = 1e-12  # below, the correlation is undefined; a new value head has some 1e-6


class PolicyValues(NamedTuple):
    """Mean reward of the policy's continuations of each prefix, and the mean's standard error."""

    mean: Float[Tensor, " prefix"]
    standard_error: Float[Tensor, " prefix"]


def policy_values(
    policy: TransformerWithValueHead,
    prefixes: Sequence[Sequence[int]],
    spec: SamplingSpec,
    reward: Callable[[Samples], Float[Tensor, " rows"]],
    continuations: int,
    generator: torch.Generator,
) -> PolicyValues:
    """Estimate the value of each prefix under the current policy from sampled continuations.

    The value is the expected reward, without discount and KL; the error is s / sqrt(n).

    Args:
        prefixes: token ids.
        reward: of samples whose prompt is the prefix.

    V(s) = E[r(text) | text begins with s, and the policy generates the rest]
    (from resets, as in Kazemnejad et al. 2024, "VinePPO", arXiv 2410.01679)
    """
    if continuations < 2:
        raise ConfigError(
            f"continuations={continuations} has no standard error. Use 2 or more, such as 16."
        )
    rows = [prefix for prefix in prefixes for _ in range(continuations)]
    samples = sample(policy, rows, spec, generator, part_size=ROWS_TOGETHER)
    rewards = exact(reward(samples)).cpu().reshape(len(prefixes), continuations)
    return PolicyValues(rewards.mean(1), rewards.std(1) / continuations**0.5)


def correlation_with(
    estimate: Float[Tensor, "*rows"],
    value: Float[Tensor, "*rows"],
    mask: Bool[Tensor, "*rows"] | None = None,
    resamples: int = 2000,
) -> Interval:
    """Compute the correlation of estimates with values over sequences (axis 0), in every cell.

    It is nan if one of the two does not vary.

    Args:
        mask: False where there is no value; all count when None.
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
