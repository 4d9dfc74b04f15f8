"""Intervals on a page: of stored columns, as whiskers and as brackets behind a number."""

from jaxtyping import Float
from torch import Tensor

from rlhf_lab.functional import Interval, bootstrap_means
from rlhf_lab.probes.probe import RESAMPLES
from rlhf_lab.views.plots import Ends

HOW = "95 %, bootstrap over sequences"


def mean_of_rows(rows: Float[Tensor, "*name n"]) -> Interval:
    """The mean of each row over its sequences, with its interval."""
    return bootstrap_means(rows.movedim(-1, 0), resamples=RESAMPLES)


def whisker_ends(interval: Interval) -> Ends:
    """The ends of several intervals; None where there is none."""
    missing = [None] * len(interval.value)
    if interval.low is None or interval.high is None:
        return missing, missing
    low, high = (
        [None if x != x else x for x in end.tolist()] for end in (interval.low, interval.high)
    )
    return low, high


def bracketed(value: float | None, low: float | None, high: float | None) -> str:
    """A number with its interval, as in `0.42 [0.31, 0.53]`; a dash for one that is not known."""
    if value is None:
        return "–"
    if low is None or high is None:
        return f"{value:.4g}"
    return f"{value:.4g} [{low:.3g}, {high:.3g}]"
