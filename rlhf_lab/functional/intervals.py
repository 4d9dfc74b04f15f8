"""Confidence intervals by bootstrap over sequences, and the fraction that a patch recovers."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.functional.masks import check_mask, check_same_shape

__all__ = ["Interval", "bootstrap_interval", "bootstrap_means", "recovered_fraction"]

FEWEST_DEFINED = 0.9
"""The share of resamples in which a statistic must be defined, or there is no interval."""

Statistic = Callable[..., Float[Tensor, "*shape"] | float]


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval and the number of sequences behind it.

    Args:
        value: of the statistic on all sequences, a number or several; None where it is undefined.
        low, high: the ends of the interval; None where there is none, such as of one sequence.
        n: sequences.
        level: the share of such intervals that hold the truth, for many sequences.
        compared: how many estimates this one was selected among.
        why: the reason, where value or interval is missing.
    """

    value: Float[Tensor, "*shape"] | None
    low: Float[Tensor, "*shape"] | None
    high: Float[Tensor, "*shape"] | None
    n: int
    level: float = 0.95
    compared: int = 1
    why: str = ""

    def __getitem__(self, index: int | tuple[int, ...]) -> "Interval":
        """One estimate of several."""
        parts = (self.value, self.low, self.high)
        value, low, high = (None if part is None else part[index] for part in parts)
        return replace(self, value=value, low=low, high=high)

    def best(self) -> tuple[tuple[int, ...], "Interval"]:
        """Where the largest of several estimates is, and that estimate, which knows among how many.

        The interval is of this one alone: the largest of many is larger than it would be on other
        sequences, the more so the more there are.
        """
        if self.value is None:
            raise ValueError(f"there is no estimate to choose ({self.why}).")
        flat = self.value.nan_to_num(nan=-math.inf).argmax()
        where = tuple(int(i) for i in torch.unravel_index(flat, self.value.shape))
        return where, replace(self[where], compared=self.value.numel() * self.compared)

    def __str__(self) -> str:
        """Such as `0.42 [0.31, 0.53], n = 64, the best of 10`."""
        n = f"n = {self.n}" + (f", the best of {self.compared}" if self.compared > 1 else "")
        if self.value is None:
            return f"undefined ({self.why}), {n}"
        if self.value.ndim:
            return f"{tuple(self.value.shape)} estimates, {n}"
        if self.low is None or self.high is None or self.low.isnan():
            return f"{self.value.item():.3g} (no interval: {self.why}), {n}"
        low, high = self.low.item(), self.high.item()
        return f"{self.value.item():.3g} [{low:.3g}, {high:.3g}], {n}"


def bootstrap_interval(
    *columns: Tensor,
    mask: Bool[Tensor, "*shape"] | None = None,
    statistic: Statistic | None = None,
    level: float = 0.95,
    resamples: int = 2000,
    generator: torch.Generator | None = None,
) -> Interval:
    """Give a statistic of sequences with its percentile bootstrap interval.

    1. Leave out the sequences that have nothing under the mask.
    2. Draw as many sequences as there are, with replacement: whole sequences, since the tokens of
       one are not independent. The same ones are taken from every column.
    3. Take the statistic of them; do so `resamples` times.
    4. Give the quantiles (1 - level) / 2 and (1 + level) / 2 of what was found.

    Columns have a row per sequence. Without a `statistic`, there is one column, and it is the mean
    over all its real entries: the sum of the sequences' sums by the sum of their lengths. Else it
    is called with the drawn rows of each column, and those of the mask if there is one; it gives a
    number, or a tensor of several. Resamples in which it is nan (an R2 without variance, an AUC of
    one class) are left out; if they are more than one in ten, there is no interval, nor is there of
    one sequence. With few sequences (some 20) intervals are too narrow.

    Draws are the same every time unless a `generator` (of the CPU) is given. Computed on the CPU in
    float64. Raises ValueError for a level outside 0 to 1, fewer than 100 resamples, columns or a
    mask of unequal length, nan under the mask, and if there is no sequence.

    Source: Efron 1979; Efron and Tibshirani 1993, chapter 13
    """
    _check_draws(level, resamples)
    rows = [_on_cpu(column) for column in columns]
    if mask is not None:
        mask = mask.cpu()
        if statistic is None:
            check_mask(rows[0], mask)
            check_same_shape(values=rows[0], mask=mask)
        has_any = mask.reshape(len(mask), -1).any(1)
        rows, mask = [row[has_any] for row in _of_one_length(*rows, mask)[:-1]], mask[has_any]
    n = len(_of_one_length(*rows)[0])
    if not n:
        raise _no_sequence()
    if statistic is None:
        sums, counts = _sums_of_rows(rows, mask)
        how = {"level": level, "resamples": resamples, "generator": generator}
        return bootstrap_means(sums, counts, statistic=torch.div, **how)
    given = rows if mask is None else [*rows, mask]
    take = lambda drawn: _as_float64(statistic(*(row[drawn] for row in given)))
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    draws = (torch.randint(n, (n,), generator=generator) for _ in range(resamples if n > 1 else 0))
    return _interval(take(torch.arange(n)), [take(drawn) for drawn in draws], n, level)


def bootstrap_means(
    *columns: Tensor,
    statistic: Statistic | None = None,
    level: float = 0.95,
    resamples: int = 2000,
    generator: torch.Generator | None = None,
) -> Interval:
    """Give the interval of what depends on the means of columns alone, for many numbers at once.

    1. Draw sequences with replacement as `bootstrap_interval` does, and average each column.
    2. Call the `statistic` with the means, once for all resamples: a ratio, or the R2 of a fit from
       the means of its squared errors, of y and of y squared. Without it, it is the mean itself.

    Columns have a row per sequence, of numbers of any shape; `statistic` takes means with an axis
    of resamples in front of that shape. Thousands of times as fast as a call per resample. Raises
    ValueError as `bootstrap_interval` does.

    Source: Efron and Tibshirani 1993, chapter 13
    """
    _check_draws(level, resamples)
    rows = [column.double() for column in _of_one_length(*map(_on_cpu, columns))]
    n = len(rows[0])
    if not n:
        raise _no_sequence()
    found_of = (lambda mean: mean) if statistic is None else statistic
    whole = found_of(*(row.mean(0, keepdim=True) for row in rows))[0]
    if n == 1:
        return _interval(whole, [], n, level)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    draws = torch.randint(n, (resamples, n), generator=generator)
    share = torch.zeros(resamples, n, dtype=torch.float64)
    share.scatter_add_(1, draws, torch.full_like(share, 1 / n))
    means = [(share @ row.reshape(n, -1)).reshape(resamples, *row.shape[1:]) for row in rows]
    return _interval(whole, found_of(*means), n, level)


def recovered_fraction(
    clean: Float[Tensor, " batch"],
    corrupted: Float[Tensor, " batch"],
    patched: Float[Tensor, " batch"],
    level: float = 0.95,
    resamples: int = 2000,
    generator: torch.Generator | None = None,
) -> Interval:
    """Say how much of an effect a patch brings back: 0 none of it, 1 all; with its interval.

    1. Average each of the three over the sequences, which are the same in all.
    2. Divide what the patch changes by what was there to change.
    3. Where the interval of the difference of clean and corrupted holds 0, there was nothing to
       recover: the fraction is undefined, and its `why` says so.

    The interval is a bootstrap over sequences (see `bootstrap_interval`), and may lie outside 0 to
    1. Raises ValueError if the shapes differ, or as `bootstrap_interval` does.

    f = (mean patched - mean corrupted) / (mean clean - mean corrupted)
    (Wang et al. 2022, arXiv 2211.00593; Heimersheim and Nanda 2024, arXiv 2404.15255)
    """
    check_same_shape(clean=clean, corrupted=corrupted, patched=patched)
    how = {"level": level, "resamples": resamples}
    seed = 0 if generator is None else int(torch.randint(2**31, (), generator=generator))
    fork = lambda: torch.Generator().manual_seed(seed)  # both intervals draw the same sequences
    change, effect = (_on_cpu(rows) - _on_cpu(corrupted) for rows in (patched, clean))
    found = bootstrap_interval(effect, **how, generator=fork())
    is_noise = found.low is not None and found.low <= 0 <= found.high
    if is_noise or found.value == 0:
        why = f"clean and corrupted differ by {found}: no more than noise"
        return Interval(None, None, None, found.n, level, why=why)
    return bootstrap_means(change, effect, statistic=_fraction, **how, generator=fork())


def _fraction(
    change: Float[Tensor, " resamples"], effect: Float[Tensor, " resamples"]
) -> Float[Tensor, " resamples"]:
    """The recovered fraction of these means; nan where there is nothing to recover."""
    return torch.where(effect == 0, torch.nan, change / effect)


def _on_cpu(column: Tensor) -> Tensor:
    """A column where float64 is, without its history; labels keep their kind."""
    column = column.detach().cpu()
    return column.double() if column.is_floating_point() else column


def _as_float64(found: Tensor | float) -> Float[Tensor, "*shape"]:
    return torch.as_tensor(found, dtype=torch.float64)


def _of_one_length(*rows: Tensor) -> tuple[Tensor, ...]:
    """The columns, or a refusal: each has a row per sequence."""
    lengths = {tuple(row.shape[:1]) for row in rows}
    if len(lengths) != 1 or () in lengths:
        shapes = ", ".join(str(tuple(row.shape)) for row in rows)
        raise ValueError(f"columns have the shapes {shapes}; give a row per sequence in each.")
    return rows


def _sums_of_rows(
    rows: list[Tensor], mask: Tensor | None
) -> tuple[Float[Tensor, " n"], Int[Tensor, " n"]]:
    """The sum and the number of the real entries of each row."""
    if len(rows) != 1:
        raise ValueError(f"{len(rows)} columns need a statistic that takes so many; give one.")
    values = rows[0].double()
    real = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    values = values.masked_fill(~real, 0.0)
    if values.isnan().any():
        raise ValueError(
            "values hold nan where the mask is True; mask those entries, or correct them."
        )
    return values.reshape(len(values), -1).sum(1), real.reshape(len(values), -1).sum(1)


def _interval(
    value: Float[Tensor, "*shape"],
    found: Float[Tensor, "..."] | list[Float[Tensor, "*shape"]],
    n: int,
    level: float,
) -> Interval:
    """The quantiles of what was found, where enough of it is defined."""
    if n == 1:
        return Interval(value, None, None, n, level, why="one sequence")
    found = found if isinstance(found, Tensor) else torch.stack(found)
    defined = (~found.isnan()).double().mean(0)
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    ends = found.nanquantile(tails, dim=0)
    low, high = torch.where(defined < FEWEST_DEFINED, torch.nan, ends)
    why = f"the statistic is defined in {defined.min():.0%} of the resamples"
    if low.isnan().all():
        return Interval(value, None, None, n, level, why=why)
    return Interval(value, low, high, n, level, why=why if low.isnan().any() else "")


def _check_draws(level: float, resamples: int) -> None:
    """Refuse a level that is no share, and resamples of which no quantile can be taken."""
    if not 0 < level < 1 or resamples < 100:
        raise ValueError(
            f"level is {level} and resamples is {resamples}; give a level between 0 and 1, such as "
            "0.95, and at least 100 resamples."
        )


def _no_sequence() -> ValueError:
    return ValueError("there is no sequence to take a statistic of; give at least one.")
