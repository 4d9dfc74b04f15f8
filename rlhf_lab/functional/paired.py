"""Paired comparisons: a permutation test over pairs, and Student's t interval over seeds."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.functional.intervals import Interval
from rlhf_lab.functional.masks import check_same_shape

HALVINGS = 80


def paired_permutation_test(
    a: Float[Tensor, " batch"],
    b: Float[Tensor, " batch"],
    draws: int = 2000,
    generator: torch.Generator | None = None,
) -> float:
    """Compute the two-sided p-value of the mean difference between pairs.

    1. Take the difference of each pair. The mean of these differences is what you observed.
    2. Draw a sign for each pair in each draw, with `torch.randint(2, (draws, batch),
       generator=generator)`, where 0 means -1. If there is no effect, each difference could just as
       well have had the opposite sign.
    3. For each draw, flip the signs of the differences, and take their mean.
    4. Count the draws whose mean is at least as far from 0 as the observed one. To allow for
       rounding, means that agree to 1e-9 (relative) count as equal. The observed mean is a draw
       too, so p is (1 + count) / (1 + draws).

    The signs are the same in every call unless you pass a (CPU) `generator`. Computed on the CPU in
    float64. Raises ValueError for fewer than 100 draws, for nan, and if there is no pair.

    p = (1 + #{|mean s d| >= |mean d|}) / (1 + draws)    (Fisher 1935; Phipson and Smyth 2010)
    """
    check_same_shape(a=a, b=b)
    differences = a.detach().cpu().double() - b.detach().cpu().double()
    if draws < 100 or not len(differences) or differences.isnan().any():
        raise ValueError(
            f"A permutation test needs at least 100 draws and 1 pair without nan, got draws={draws}"
            f" and {len(differences)} pairs, {int(differences.isnan().sum())} of them nan."
        )
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    signs = 2 * torch.randint(2, (draws, len(differences)), generator=generator) - 1
    means = (signs * differences).mean(1)
    reaches = means.abs() >= (1 - 1e-9) * differences.mean().abs()
    return (1 + reaches.sum().item()) / (1 + draws)


def seed_interval(
    treated: Float[Tensor, " seeds"], control: Float[Tensor, " seeds"], level: float = 0.95
) -> Interval:
    """Compute the mean difference between paired runs, one pair per seed, with its interval.

    1. Take the difference of each pair, treated minus control, in float64. Their mean is the value.
    2. The standard error is the unbiased standard deviation of the n differences over sqrt(n).
    3. The interval extends `t_two_sided(level, n - 1)` standard errors to either side. Return
       `Interval(value, low, high, n, level)`.
    4. A single pair has no interval: set low and high to None, and add `why="one seed"`.

    Entry i of both tensors belongs to seed i. With three seeds the factor is 4.3, compared with
    1.96 for a normal distribution. The interval assumes that differences over many seeds are about
    normally distributed. Raises ValueError for nan, inf, empty tensors, or a level outside 0 to 1.

    mean(d) +- t_{n-1} std(d) / sqrt(n)    (Student 1908; Agarwal et al. 2021, arXiv 2108.13264, on
    runs over few seeds)
    """
    check_same_shape(treated=treated, control=control)
    differences = treated.detach().cpu().double() - control.detach().cpu().double()
    n = len(differences)
    if not n or not differences.isfinite().all():
        raise ValueError(f"Differences of at least one seed must be finite, got {differences}.")
    factor = t_two_sided(level, max(n - 1, 1))
    mean = differences.mean()
    if n == 1:
        return Interval(mean, None, None, n, level, why="one seed")
    reach = factor * differences.std() / math.sqrt(n)
    return Interval(mean, mean - reach, mean + reach, n, level)


def t_two_sided(level: float, degrees: int) -> float:
    """Compute the t with P(|T| <= t) = level for Student's t, by bisection of the angle.

    With t = sqrt(degrees) tan(angle) that probability is a finite sum of powers of cos(angle).
    Raises ValueError unless 0 < level < 1 and degrees >= 1.

    Source: Abramowitz and Stegun 1964, 26.7.3 and 26.7.4
    """
    if not 0 < level < 1 or degrees < 1:
        raise ValueError(
            f"level must be between 0 and 1 and degrees at least 1, got level={level} and "
            f"degrees={degrees}."
        )
    low, high = 0.0, math.pi / 2
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _probability_within(middle, degrees) < level:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _probability_within(angle: float, degrees: int) -> float:
    cosine, odd = math.cos(angle), degrees % 2
    term, total = cosine if odd else 1.0, 0.0
    for k in range(2 + odd, degrees + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
