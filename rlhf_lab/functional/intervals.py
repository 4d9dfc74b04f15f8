"""Confidence intervals by bootstrap over sequences, and the fraction that a patch recovers."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.functional.masks import check_same_shape, real_entries

FEWEST_DEFINED = 0.9  # fraction of resamples in which a statistic must be defined

Statistic = Callable[..., Float[Tensor, "*shape"] | float]


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval and the number of sequences it is based on."""

    value: Float[Tensor, "*shape"] | None  # a number or several; None if undefined
    low: Float[Tensor, "*shape"] | None  # None without an interval, such as for one sequence
    high: Float[Tensor, "*shape"] | None
    n: int
    level: float = 0.95
    compared: int = 1  # number of estimates that this one was selected from
    why: str = ""  # reason why value or interval is missing

    def __getitem__(self, index: int | tuple[int, ...]) -> "Interval":
        """Return one of several estimates."""
        parts = (self.value, self.low, self.high)
        value, low, high = (None if part is None else part[index] for part in parts)
        return replace(self, value=value, low=low, high=high)

    def best(self) -> tuple[tuple[int, ...], "Interval"]:
        """Return the index of the largest estimate, and the estimate; its interval ignores that."""
        if self.value is None:
            raise ValueError(f"The interval has no estimate to choose from ({self.why}).")
        flat = self.value.nan_to_num(nan=-math.inf).argmax()
        where = tuple(int(i) for i in torch.unravel_index(flat, self.value.shape))
        return where, replace(self[where], compared=self.value.numel() * self.compared)

    def __str__(self) -> str:
        """Format as `0.42 [0.31, 0.53], n = 64, the best of 10`."""
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
    """Compute a statistic of sequences with its percentile bootstrap interval.

    1. Leave out the sequences without an entry under the mask.
    2. Draw n whole sequences with replacement, the same ones in every column, `resamples` times:
       the tokens of a sequence are not independent.
    3. Take the quantiles (1 - level) / 2 and (1 + level) / 2 of the statistic.

    Columns have a row per sequence. The `statistic` gets the drawn rows of each column, then of the
    mask, and returns a number or a tensor; None averages the real entries of one column. Resamples
    in which it is nan are left out; if more than one in ten is nan there is no interval. With some
    20 sequences or fewer, intervals are too narrow. Draws are the same every time without a CPU
    `generator`. In float64. Raises ValueError for a level outside 0 to 1, fewer than 100 resamples,
    columns of unequal length, nan under the mask, and if there is no sequence.

    Source: Efron 1979; Efron and Tibshirani 1993, chapter 13
    """
    rows = [_to_cpu(column) for column in columns]
    if statistic is None:
        settings = {"level": level, "resamples": resamples, "generator": generator}
        return bootstrap_means(*_row_sums(rows, mask), statistic=torch.div, **settings)
    if mask is not None:
        mask = real_entries(mask, mask).cpu()
        _check_rows(level, resamples, *rows, mask)
        has_any = mask.reshape(len(mask), -1).any(1)
        rows = [row[has_any] for row in [*rows, mask]]
    n = _check_rows(level, resamples, *rows)
    compute = lambda drawn: torch.as_tensor(
        statistic(*(x[drawn] for x in rows)), dtype=torch.float64
    )
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    draws = (torch.randint(n, (n,), generator=generator) for _ in range(resamples if n > 1 else 0))
    return _quantiles(compute(torch.arange(n)), [compute(drawn) for drawn in draws], n, level)


def bootstrap_means(
    *columns: Tensor,
    statistic: Statistic | None = None,
    level: float = 0.95,
    resamples: int = 2000,
    generator: torch.Generator | None = None,
) -> Interval:
    """Compute the interval of a function of the columns' means, for many numbers at once.

    The `statistic` (the mean itself if None) is called once with the means of all resamples, with
    an axis of resamples first. Otherwise the same as `bootstrap_interval`, and faster.
    """
    rows = [_to_cpu(column).double() for column in columns]
    n = _check_rows(level, resamples, *rows)
    compute = (lambda mean: mean) if statistic is None else statistic
    whole = compute(*(row.mean(0, keepdim=True) for row in rows))[0]
    if n == 1:
        return _quantiles(whole, [], n, level)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    draws = torch.randint(n, (resamples, n), generator=generator)
    weight = torch.zeros(resamples, n, dtype=torch.float64)
    weight.scatter_add_(1, draws, torch.full_like(weight, 1 / n))
    means = [(weight @ row.reshape(n, -1)).reshape(resamples, *row.shape[1:]) for row in rows]
    return _quantiles(whole, compute(*means), n, level)


def recovered_fraction(
    clean: Float[Tensor, " batch"],
    corrupted: Float[Tensor, " batch"],
    patched: Float[Tensor, " batch"],
    level: float = 0.95,
    resamples: int = 2000,
    generator: torch.Generator | None = None,
) -> Interval:
    """Compute the fraction of an effect that a patch recovers, from 0 to 1, with its interval.

    1. Average clean, corrupted and patched over the same sequences.
    2. Divide the patch's effect (patched - corrupted) by the whole effect (clean - corrupted).
    3. If the interval of the whole effect includes 0, there is nothing to recover. The fraction is
       then undefined, and its `why` gives the reason.

    The interval is a bootstrap over sequences. Raises the errors of `bootstrap_interval`.

    f = (mean patched - mean corrupted) / (mean clean - mean corrupted)
    (Wang et al. 2022, arXiv 2211.00593; Heimersheim and Nanda 2024, arXiv 2404.15255)
    """
    check_same_shape(clean=clean, corrupted=corrupted, patched=patched)
    settings = {"level": level, "resamples": resamples}
    seed = 0 if generator is None else int(torch.randint(2**31, (), generator=generator))
    fork = lambda: torch.Generator().manual_seed(seed)  # both intervals draw the same sequences
    change, effect = (_to_cpu(rows) - _to_cpu(corrupted) for rows in (patched, clean))
    found = bootstrap_interval(effect, **settings, generator=fork())
    is_noise = found.low is not None and found.low <= 0 <= found.high
    if is_noise or found.value == 0:
        why = f"clean and corrupted differ by {found}: no more than noise"
        return Interval(None, None, None, found.n, level, why=why)
    fraction = lambda change, effect: torch.where(effect == 0, torch.nan, change / effect)
    return bootstrap_means(change, effect, statistic=fraction, **settings, generator=fork())


def _to_cpu(column: Tensor) -> Tensor:
    column = column.detach().cpu()
    return column.double() if column.is_floating_point() else column


def _check_rows(level: float, resamples: int, *rows: Tensor) -> int:
    """Return the number of sequences; raise ValueError unless a bootstrap over them is possible."""
    if not 0 < level < 1 or resamples < 100:
        raise ValueError(f"{level=} must be between 0 and 1, and {resamples=} at least 100.")
    shapes = [tuple(row.shape) for row in rows]
    if len({shape[:1] for shape in shapes}) != 1 or () in shapes:
        raise ValueError(f"Columns must have one row per sequence, got the shapes {shapes}.")
    if not shapes[0][0]:
        raise ValueError("A bootstrap needs at least one sequence, got none.")
    return shapes[0][0]


def _row_sums(rows: list[Tensor], mask: Tensor | None) -> tuple[Tensor, Tensor]:
    if len(rows) != 1:
        raise ValueError(f"Pass a statistic of {len(rows)} columns; the default is of one column.")
    values = rows[0].double()
    real = real_entries(values, None if mask is None else mask.cpu())
    values = values.masked_fill(~real, 0.0)
    if values.isnan().any():
        raise ValueError("The column has nan where the mask is True. Mask these entries.")
    sums, counts = (x[..., None].flatten(1).sum(1) for x in (values, real))
    return sums[counts > 0], counts[counts > 0]


def _quantiles(value: Tensor, found: Tensor | list[Tensor], n: int, level: float) -> Interval:
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
