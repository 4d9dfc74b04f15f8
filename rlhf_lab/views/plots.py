"""Functions that plot curves, bars and heatmaps as static pictures."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from rlhf_lab.views import marks, svg
from rlhf_lab.views.color import Kind
from rlhf_lab.views.pictures import (
    NO_ENDS,
    Bars,
    Curve,
    Curves,
    Ends,
    Matrix,
    Number,
    Optionals,
    Picture,
)

SIDE, WIDEST = 11, 1000  # pixels of a cell of several grids, and of all of them


def plain_numbers(values: Iterable[Any]) -> list[Any]:
    """Return numbers of a list, tensor or array as numbers of Python; None stays."""
    return [x.item() if hasattr(x, "item") else x for x in values]


def curves(
    series: Mapping[str, Curve],
    title: str,
    x_label: str = "phase",
    y_label: str = "",
    bands: Mapping[str, Ends] = NO_ENDS,
    log_x: bool = False,
) -> Picture:
    """Plot curves over phases, each with its color, dashes and marks.

    Gaps are left where a value is None; integers along x have ticks at integers only.

    Args:
        bands: intervals of some of the curves, by name.
        log_x: True for a logarithmic x axis with a tick at each value of x.

    Raises:
        ValueError: If there is no curve, an interval has another length than its curve, or x is
            not positive on a logarithmic axis.
    """
    if not series:
        raise ValueError("series is empty. Pass at least one curve.")
    series = {name: tuple(map(plain_numbers, curve)) for name, curve in series.items()}
    bands = {name: tuple(map(plain_numbers, ends)) for name, ends in bands.items()}
    lowest = min(x for xs, _ in series.values() for x in xs)
    if log_x and lowest <= 0:
        raise ValueError(f"x is {lowest} on a logarithmic axis. Use numbers greater than 0.")
    _check_ends({name: y for name, (_, y) in series.items()}, bands)
    return svg.draw_picture(Curves(series, title, y_label, bands, x_label, log_x))


def bars(
    names: Sequence[str],
    series: Mapping[str, Optionals],
    title: str,
    y_label: str = "",
    whiskers: Mapping[str, Ends] = NO_ENDS,
) -> Picture:
    """Plot groups of bars, one group per name.

    Args:
        whiskers: intervals of some of the series, by name.

    Raises:
        ValueError: If a series has another length than the names, or an interval than its series.
    """
    series = {name: plain_numbers(values) for name, values in series.items()}
    whiskers = {name: tuple(map(plain_numbers, ends)) for name, ends in whiskers.items()}
    _check_ends(series, whiskers)
    for label, values in series.items():
        if len(values) != len(names):
            raise ValueError(
                f"series {label!r} has {len(values)} values for {len(names)} names. Pass one each."
            )
    return svg.draw_picture(Bars(names, series, title, y_label, whiskers))


def heatmap(
    values: Float[Tensor, "rows cols"] | Sequence[Optionals],
    rows: Sequence[str],
    cols: Sequence[str],
    title: str,
    kind: Kind = "sequential",
    limits: tuple[Number, Number] | None = None,
) -> Picture:
    """Plot a grid of colors with its scale; entries that are None stay blank.

    Args:
        limits: the ends of the scale, by default those of the values, symmetric about 0 if
            diverging.
    """
    grid = [plain_numbers(row) for row in values]
    return svg.draw_picture(Matrix(grid, rows, cols, title, "", kind, limits))


def heatmaps(
    grids: Mapping[str, Sequence[Sequence[Number]]],
    rows: Sequence[str],
    cols: Sequence[str],
    title: str,
    across: int = 4,
    limits: tuple[Number, Number] | None = None,
) -> Picture:
    """Plot grids of the same rows and columns with one scale, at most `across` in a row.

    The scale is from 0 to the largest number if limits is None.

    Raises:
        ValueError: If there is no grid.
    """
    if not grids:
        raise ValueError("grids is empty. Pass at least one.")
    grids = {name: [plain_numbers(row) for row in grid] for name, grid in grids.items()}
    limits = limits or (
        0.0,
        max((x for g in grids.values() for row in g for x in row), default=0) or 1,
    )
    drawn = [svg.matrix_grid(Matrix(grid, rows, cols), limits, SIDE) for grid in grids.values()]
    wide = max(max(width for width, *_ in drawn), marks.widest(list(grids)) + 12)
    tall, across = drawn[0][1] + 26, max(1, min(across, len(grids), int(WIDEST // wide)))
    whole = max(326.0, across * wide)
    head, top = marks.header(title, "", (), whole)
    parts = [head, svg.color_scale(limits, "sequential", top)]
    for i, (name, (_, _, grid)) in enumerate(zip(grids, drawn, strict=True)):
        x, y = i % across * wide, top + svg.SCALE_HEIGHT + i // across * tall
        parts += [marks.text(x + 8, y + 10, name), marks.moved(grid, x, y + 16)]
    height = top + svg.SCALE_HEIGHT + -(-len(grids) // across) * tall
    alt = f"{title}: {', '.join(grids)}"
    return Picture(marks.document(whole, height, "".join(parts), alt), alt)


def _check_ends(series: Mapping[str, Optionals], intervals: Mapping[str, Ends]) -> None:
    for name, ends in intervals.items():
        if name not in series or any(len(end) != len(series[name]) for end in ends):
            raise ValueError(
                f"the intervals of {name!r} have {len(ends[0])} and {len(ends[1])} ends for "
                f"{len(series.get(name, ()))} values. Pass one of each per value of a series."
            )
