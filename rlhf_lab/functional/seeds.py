"""The interval of a difference over seeds: paired runs, Student's t."""

import math

from jaxtyping import Float
from torch import Tensor

from rlhf_lab.functional.intervals import Interval
from rlhf_lab.functional.masks import check_same_shape

__all__ = ["seed_interval", "t_two_sided"]

HALVINGS = 80


def seed_interval(
    treated: Float[Tensor, " seeds"], control: Float[Tensor, " seeds"], level: float = 0.95
) -> Interval:
    """Give the mean difference of paired runs, one pair per seed, with its interval over seeds.

    1. Take the difference of each pair, treated minus control, in float64; their mean is the value.
    2. Its standard error is their unbiased standard deviation over the root of their number n.
    3. The interval reaches `t_two_sided(level, n - 1)` standard errors to either side: give
       `Interval(value, low, high, n, level)`.
    4. A single pair has no interval: low and high are None, and `why="one seed"` is added.

    Entry i of both belongs to seed i: the two runs of a pair differ in what is compared, and in
    nothing else. `n` counts seeds. With three seeds the factor is 4.3, where a normal distribution
    has 1.96 and a bootstrap is narrower still. It assumes that differences over many seeds would be
    about normal. Raises ValueError if the shapes differ, for nan or inf, for a level outside 0 to
    1, and if there is no seed.

    mean(d) +- t_{n-1} std(d) / sqrt(n)    (Student 1908; Agarwal et al. 2021, arXiv 2108.13264, on
    runs over few seeds)
    """
    check_same_shape(treated=treated, control=control)
    differences = treated.detach().cpu().double() - control.detach().cpu().double()
    n = len(differences)
    if not n:
        raise ValueError("there is no seed to take a difference of; give at least one pair.")
    if not differences.isfinite().all():
        raise ValueError("a difference is nan or inf; leave that pair out, and say so.")
    factor = t_two_sided(level, max(n - 1, 1))
    mean = differences.mean()
    if n == 1:
        return Interval(mean, None, None, n, level, why="one seed")
    reach = factor * differences.std() / math.sqrt(n)
    return Interval(mean, mean - reach, mean + reach, n, level)


def t_two_sided(level: float, degrees: int) -> float:
    """Give the t that Student's t stays within, on both sides of 0, with a chance of `level`.

    1. With t = sqrt(degrees) tan(angle) that chance is a finite sum of powers of cos(angle).
    2. Halve the range of angles, from 0 to a right angle, until it is as narrow as rounding allows.

    `degrees` of freedom are one fewer than the numbers whose mean is taken. Raises ValueError for a
    level outside 0 to 1, and for fewer than 1 degree.

    Source: Abramowitz and Stegun 1964, 26.7.3 and 26.7.4
    """
    if not 0 < level < 1 or degrees < 1:
        raise ValueError(
            f"level is {level} and degrees is {degrees}; give a level between 0 and 1, such as "
            "0.95, and at least 1 degree of freedom."
        )
    low, high = 0.0, math.pi / 2
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _chance_within(middle, degrees) < level:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _chance_within(angle: float, degrees: int) -> float:
    """The chance that |t| is at most sqrt(degrees) tan(angle)."""
    cosine, odd = math.cos(angle), degrees % 2
    term, total = cosine if odd else 1.0, 0.0
    for k in range(2 + odd, degrees + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
