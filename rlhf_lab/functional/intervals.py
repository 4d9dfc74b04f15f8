"""Confidence intervals by bootstrap over sequences, and the fraction that a patch recovers."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.functional.masks import check_mask, check_same_shape

__all__ = ["Interval", "bootstrap_interval", "recovered_fraction"]

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
        if self.low is None or self.high is None:
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
    if not 0 < level < 1 or resamples < 100:
        raise ValueError(
            f"level is {level} and resamples is {resamples}; give a level between 0 and 1, such as "
            "0.95, and at least 100 resamples."
        )
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
        raise ValueError("there is no sequence to take a statistic of; give at least one.")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    if statistic is None:
        take = _mean_of_rows(rows, mask)
    else:
        given = rows if mask is None else [*rows, mask]
        take = lambda drawn: _as_float64(statistic(*(row[drawn] for row in given)))
    value = take(torch.arange(n))
    if n == 1:
        return Interval(value, None, None, n, level, why="one sequence")
    draw = lambda: torch.randint(n, (n,), generator=generator)
    found = torch.stack([take(draw()) for _ in range(resamples)])
    defined = (~found.isnan()).double().mean(0)
    if (defined < FEWEST_DEFINED).any():
        why = f"the statistic is defined in {defined.min():.0%} of the resamples"
        return Interval(value, None, None, n, level, why=why)
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = found.nanquantile(tails, dim=0)
    return Interval(value, low, high, n, level)


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
    effect = bootstrap_interval(_on_cpu(clean) - _on_cpu(corrupted), **how, generator=fork())
    is_noise = effect.low is not None and effect.low <= 0 <= effect.high
    if is_noise or effect.value == 0:
        why = f"clean and corrupted differ by {effect}: no more than noise"
        return Interval(None, None, None, effect.n, level, why=why)
    return bootstrap_interval(
        clean, corrupted, patched, statistic=_fraction, **how, generator=fork()
    )


def _fraction(
    clean: Float[Tensor, " batch"],
    corrupted: Float[Tensor, " batch"],
    patched: Float[Tensor, " batch"],
) -> Float[Tensor, ""]:
    """The recovered fraction of these sequences; nan where there is nothing to recover."""
    effect = (clean - corrupted).mean()
    return torch.where(effect == 0, torch.nan, (patched - corrupted).mean() / effect)


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


def _mean_of_rows(
    rows: list[Tensor], mask: Tensor | None
) -> Callable[[Int[Tensor, " n"]], Float[Tensor, ""]]:
    """The mean over all real entries of some rows, from each row's sum and count."""
    if len(rows) != 1:
        raise ValueError(f"{len(rows)} columns need a statistic that takes so many; give one.")
    values = rows[0].double()
    real = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    values = values.masked_fill(~real, 0.0)
    if values.isnan().any():
        raise ValueError(
            "values hold nan where the mask is True; mask those entries, or correct them."
        )
    sums, counts = values.reshape(len(values), -1).sum(1), real.reshape(len(values), -1).sum(1)
    return lambda drawn: sums[drawn].sum() / counts[drawn].sum()
