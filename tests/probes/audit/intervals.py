"""Checks of stored intervals: each holds its mean, and is as wide as standard errors say."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from rlhf_lab.probes.probe import Check

FEWEST_ROWS = 8
"""Below, the bootstrap's width and the standard error may differ by much."""
FEWEST_COLUMNS = 3
NORMAL_WIDTH = 2 * 1.96
FINEST_WIDTH = 2e-5
"""Of intervals that are stored with six decimals."""


def check_widths(
    what: str,
    ends: tuple[Sequence[float], Sequence[float]],
    x: Float[np.ndarray, "rows cols"],
    mask: Bool[np.ndarray, "rows cols"],
    rounding: float = 0.0,
) -> Check:
    """Hold stored intervals of the means of columns to 2 x 1.96 standard errors over the rows.

    A percentile interval of a skewed column is narrower or wider by less than a factor of 2, and
    of three columns and more the one in the middle by less than 2^0.4. What counts is the log2 of
    the ratio, or infinity where an interval does not hold its mean, or is of no rows. Columns of
    fewer than 8 rows need only hold theirs; those whose spread is lost in six decimals, or in
    rounding, are left out.

    Args:
        rounding: how far apart the numbers of `x` and those behind the intervals may be.
    """
    found: list[float] = []
    for low, high, column, real in zip(*ends, x.T, mask.T, strict=True):
        among = column[real]
        few = len(among) < FEWEST_ROWS
        if not len(among) and not math.isnan(low):
            found.append(math.inf)
        if len(among) < 2 or (few and math.isnan(low)):
            continue
        width = NORMAL_WIDTH * among.std(ddof=1) / math.sqrt(len(among))
        if width < max(FINEST_WIDTH, 4 * rounding):
            continue
        spare = 2e-6 + rounding
        holds = low - spare <= among.mean() <= high + spare
        ratio = (high - low) / width if holds else 0.0
        if not few or not holds:
            found.append(math.log2(ratio) if ratio > 0 else math.inf)
    worst = max(map(abs, found), default=0.0)
    if len(found) >= FEWEST_COLUMNS:
        worst = max(worst, abs(float(np.median(found))) / 0.4)
    return Check.at_most(f"intervals of {what} are those of standard errors", worst, 1.0)
