"""Masked sums, means, variances and whitening; loss aggregation; Running mean and variance."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.functional.masks import (
    at_least_float32,
    check_mask,
    check_same_shape,
    real_entries,
    zero_masked,
)

Aggregation = Literal["token_mean", "sequence_mean", "constant"]
Denominator = int | float | Tensor | None
Dims = int | tuple[int, ...] | None
FAR = 8.0  # standard deviations; numbers whose mean is farther from 0 are centered twice


def sequence_sum(
    x: Float[Tensor, "batch gen"], mask: Bool[Tensor, "batch gen"] | None = None
) -> Float[Tensor, " batch"]:
    """Sum x over the real tokens of each sequence.

    1. Put 0 where the mask is False.
    2. Sum over the generated tokens.

    A row without a real token sums to 0.0.
    """
    check_same_shape(x=x, mask=mask)
    return zero_masked(at_least_float32(x), mask).sum(dim=-1)


def masked_mean(
    x: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    dim: Dims = None,
    denominator: Denominator = None,
) -> Float[Tensor, "..."]:
    """Average x over the entries where the mask is True.

    1. Put 0 where the mask is False.
    2. Sum over `dim` (over everything if `dim` is None).
    3. Divide by `denominator`, or by the number of real entries in the sum if it is None. Divide
       by 1 instead of by 0: without real entries, the mean and its gradient are 0.

    For a minibatch that is split into micro-batches, pass the number of real tokens of the whole
    minibatch as `denominator`. The results then add up to its mean. Half-precision input gives a
    float32 result. Raises ValueError for a mask of another shape or a negative denominator.

    mean = sum_i m_i x_i / sum_i m_i
    """
    x = at_least_float32(x)
    check_same_shape(x.shape, mask=mask)
    total = zero_masked(x, mask).sum(dim=dim)
    if denominator is None:
        denominator = real_entries(x, mask).sum(dim=dim)
    elif not isinstance(denominator, Tensor) and denominator < 0:
        raise ValueError(f"denominator must be at least 0, got {denominator}.")
    count = torch.as_tensor(denominator, dtype=x.dtype, device=x.device)
    return total / count.masked_fill(count == 0, 1.0)


def masked_var(
    x: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    dim: Dims = None,
    unbiased: bool = True,
) -> Float[Tensor, "..."]:
    """Compute the variance of x over the entries where the mask is True.

    A single real entry, or none, has variance 0.0 (not nan). A rounded mean adds no variance.

    var = sum_i m_i (x_i - mean)^2 / (sum_i m_i - 1), without the - 1 if not `unbiased`
    """
    x, real = zero_masked(at_least_float32(x), mask), real_entries(x, mask)
    dim = tuple(range(x.ndim)) if dim is None else dim
    count = real.sum(dim=dim, keepdim=True)
    mean = x.sum(dim=dim, keepdim=True) / count.clamp(min=1)
    centered = zero_masked(x - mean, real)
    squares, error = (y.sum(dim=dim, keepdim=True) for y in (centered.square(), centered))
    squares = squares - (error.square() / count.clamp(min=1)).nan_to_num(posinf=0.0)
    return (squares.clamp(min=0) / (count - int(unbiased)).clamp(min=1)).squeeze(dim)


def masked_std(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"] | None = None, dim: Dims = None
) -> Float[Tensor, "..."]:
    """Compute the root of `masked_var`; its gradient is 0, not infinite, at variance 0."""
    var = masked_var(x, mask, dim)
    return torch.where(var > 0, var, 1.0).sqrt() * (var > 0)


def whiten(
    x: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    shift_mean: bool = True,
    eps: float = 1e-8,
) -> Float[Tensor, "*shape"]:
    """Scale x to variance 1, and its mean to 0 if `shift_mean`; equal entries to exactly 0.0.

    w_i = (x_i - mean) / sqrt(var + eps)   (`whiten` in the code of Ziegler et al. 2019)
    """
    x, unreal = zero_masked(at_least_float32(x), mask), ~real_entries(x, mask)
    if not x.numel():
        return x
    mean, var = masked_mean(x, mask), masked_var(x, mask)
    centered = x - mean
    is_far = mean.abs() > FAR * var.sqrt()  # the rounding error of the mean matters
    centered = centered - torch.where(is_far, masked_mean(centered, mask), 0.0)
    whitened = centered * torch.rsqrt(var + eps)
    lowest = x.masked_fill(unreal, torch.inf).min()
    highest = x.masked_fill(unreal, -torch.inf).max()
    whitened = whitened.masked_fill(lowest == highest, 0.0)  # not rounding errors, scaled to 1
    if not shift_mean:
        whitened = whitened + mean
    return zero_masked(whitened, mask)


def aggregate(
    x: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"] | None = None,
    aggregation: Aggregation = "token_mean",
    denominator: Denominator = None,
) -> Float[Tensor, ""]:
    """Average a quantity per token over a batch, in one of three ways.

    - "token_mean": each token has the same weight (DAPO).
    - "sequence_mean": the mean of the sequences' means (GRPO).
    - "constant": the sum over tokens, divided by a number independent of their lengths (Dr. GRPO).

    With the sum of `aggregation_denominator` over all micro-batches (or ranks) as `denominator`,
    their results add up to that of the minibatch. Without a real token 0.0, with gradient 0.

    Source: DAPO, arXiv 2503.14476, section 3.3; Dr. GRPO, arXiv 2503.20783
    """
    mask = real_entries(x, mask)
    total = aggregation_denominator(mask, aggregation)  # also validates the name
    denominator = total if denominator is None else denominator
    if aggregation == "sequence_mean":
        per_sequence = masked_mean(x, mask, dim=-1)
    else:
        per_sequence = sequence_sum(x, mask)
    return masked_mean(per_sequence, denominator=denominator)


def aggregation_denominator(
    mask: Bool[Tensor, "batch gen"],
    aggregation: Aggregation = "token_mean",
    max_len: int | None = None,
) -> Float[Tensor, ""]:
    """Count the denominator of `aggregate`; counts of micro-batches and ranks add up.

    The number of real tokens ("token_mean"), of sequences with a real token ("sequence_mean"), or
    of sequences times `max_len` ("constant"; the length of the mask if None).
    """
    check_mask(mask, mask)
    if aggregation == "token_mean":
        return mask.sum().float()
    if aggregation == "sequence_mean":
        return mask.any(dim=-1).sum().float()
    if aggregation == "constant":
        max_len = mask.shape[1] if max_len is None else max_len
        return torch.full((), float(len(mask) * max_len), device=mask.device)
    raise ValueError(
        f"Unknown aggregation {aggregation!r}. Choose one of: token_mean, sequence_mean, constant."
    )


@dataclass(frozen=True)
class RunningMoments:
    """Count, mean and sum of squared deviations (m2) of a stream of numbers; immutable.

    Source: Chan, Golub and LeVeque 1983
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    @classmethod
    def of(
        cls, x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"] | None = None
    ) -> "RunningMoments":
        """Compute the moments of the real entries of x; raises ValueError for nan and inf."""
        real = x[real_entries(x, mask)].detach().cpu().double()
        if not real.isfinite().all():
            count = int((~real.isfinite()).sum())
            raise ValueError(f"x contains {count} numbers that are nan or inf. Mask them.")
        if not len(real):
            return cls()
        mean = real.mean()
        return cls(len(real), mean.item(), (real - mean).square().sum().item())

    def merge(self, other: "RunningMoments") -> "RunningMoments":
        """Combine the moments of two streams.

        M2 = M2_a + M2_b + d^2 n_a n_b / (n_a + n_b), d = mean_b - mean_a   (equation 2.1)
        """
        count = self.count + other.count
        if not count:
            return self
        distance = other.mean - self.mean
        mean = self.mean + distance * other.count / count
        m2 = self.m2 + other.m2 + distance**2 * self.count * other.count / count
        return RunningMoments(count, mean, m2)

    def update(
        self, x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"] | None = None
    ) -> "RunningMoments":
        """Merge with the moments of x, see `of`."""
        return self.merge(self.of(x, mask))

    @property
    def var(self) -> float:
        """The unbiased variance; 0.0 of fewer than two numbers."""
        return self.m2 / max(self.count - 1, 1)

    @property
    def std(self) -> float:
        """The root of the unbiased variance."""
        return math.sqrt(self.var)


def scale_rewards(
    rewards: Float[Tensor, " batch"],
    moments: RunningMoments,
    shift_mean: bool = False,
    eps: float = 1e-8,
) -> Float[Tensor, " batch"]:
    """Divide rewards by the deviation of all rewards so far, if it is above 0.

    r' = (r - mean) / (std + eps)   (the score scaling and norm of TRL's PPO trainer)
    """
    rewards = at_least_float32(rewards)
    if shift_mean:
        rewards = rewards - moments.mean
    return rewards / (moments.std + eps) if moments.std > 0 else rewards
