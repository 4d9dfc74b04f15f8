"""Plots: curves, bars and heatmaps as static pictures, drawn by matplotlib without a window."""

import io
import textwrap
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

from rlhf_lab.views.color import BLUE, NEUTRAL, ORANGE, Kind
from rlhf_lab.views.picture import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_MARKS = ("o", "s", "^", "D", "v", "P", "X")
MOST_MARKS = 30
"""A curve through more points than this has no marks."""
LINES = ("-", "--", "-.", ":")
SHORT_NAME = 2
TITLE_LETTERS = 12
"""Of a title on an inch, at its size of 10 points."""
Number = float | int
Curve = tuple[Sequence[Number], Sequence[Number | None]]
Ends = tuple[Sequence[Number | None], Sequence[Number | None]]
"""The lower and the upper ends of intervals; None where there is none."""
NO_ENDS: Mapping[str, Ends] = MappingProxyType({})


def curves(
    series: Mapping[str, Curve],
    title: str,
    x_label: str = "phase",
    y_label: str = "",
    bands: Mapping[str, Ends] = NO_ENDS,
    log_x: bool = False,
) -> Picture:
    """Curves over phases, told apart by colour, line and mark.

    Gaps are left where a value is None; whole numbers along x have ticks at whole numbers only.

    Args:
        bands: intervals about the values of some of the curves, by their names.
        log_x: a logarithmic axis along x, with a tick at each place where a curve has a value.

    Raises ValueError without a curve, for intervals of another length than their curve, and for a
    place along a logarithmic axis that is not above 0.
    """
    if not series:
        raise ValueError("series is empty; give at least one curve.")
    places = sorted({place for x, _ in series.values() for place in x})
    if log_x and places[0] <= 0:
        raise ValueError(f"x is {places[0]} on a logarithmic axis; give numbers above 0.")
    _check_ends({name: y for name, (_, y) in series.items()}, bands)
    figure, axes = blank(6.4, 3.2)
    for i, (name, (x, y)) in enumerate(series.items()):
        look = {
            "color": COLORS[i % len(COLORS)],
            "marker": LINE_MARKS[i % len(LINE_MARKS)] if len(x) <= MOST_MARKS else None,
            "linestyle": LINES[i % len(LINES)],
        }
        axes.plot(list(x), _numbers(y), label=name, markersize=3.5, linewidth=1.5, **look)
        if name in bands:
            ends = [_numbers(end) for end in bands[name]]
            axes.fill_between(list(x), *ends, color=look["color"], alpha=0.18, linewidth=0)
    if log_x:
        axes.set_xscale("log")
        axes.set_xticks(places, [f"{place:,g}" for place in places])
        axes.minorticks_off()
    elif all(isinstance(place, int) for place in places):
        axes.xaxis.get_major_locator().set_params(integer=True)
    _label(axes, title, x_label, y_label)
    if len(series) > 1:
        axes.legend(fontsize=8, frameon=False)
    return finish(figure, f"{title}: {', '.join(series)} over {x_label}")


def bars(
    names: Sequence[str],
    series: Mapping[str, Sequence[Number]],
    title: str,
    y_label: str = "",
    whiskers: Mapping[str, Ends] = NO_ENDS,
) -> Picture:
    """Groups of bars, one group per name.

    Args:
        whiskers: intervals about the values of some of the series, by their names.

    Raises ValueError when a series has another length than the names, and for intervals of another
    length than their series.
    """
    _check_ends(series, whiskers)
    for label, values in series.items():
        if len(values) != len(names):
            raise ValueError(
                f"series {label!r} has {len(values)} values for {len(names)} names; give one each."
            )
    figure, axes = blank(max(4.8, 0.3 * len(names) + 1.5), 3.2)
    width = 0.8 / len(series)
    for i, (label, values) in enumerate(series.items()):
        places = [place + (i - (len(series) - 1) / 2) * width for place in range(len(names))]
        axes.bar(places, list(values), width, label=label, color=COLORS[i % len(COLORS)])
        if label in whiskers:
            ends = [_numbers(end) for end in whiskers[label]]
            axes.vlines(places, *ends, color="black", linewidth=0.9)
    _name_places(axes, names)
    _label(axes, title, "", y_label)
    if len(series) > 1:  # below, since bars may stand anywhere
        columns = min(len(series), 3)
        figure.legend(loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    return finish(figure, f"{title}: {', '.join(series)}")


def heatmap(
    values: Float[Tensor, "rows cols"] | Sequence[Sequence[Number | None]],
    rows: Sequence[str],
    cols: Sequence[str],
    title: str,
    kind: Kind = "sequential",
    limits: tuple[Number, Number] | None = None,
) -> Picture:
    """A grid of colours with a scale; entries that are None stay blank.

    Args:
        limits: the numbers at the ends of the scale; those of the data when None, symmetric about
            0 when diverging.
    """
    grid = values.tolist() if isinstance(values, Tensor) else values
    numbers = [[float("nan") if x is None else float(x) for x in row] for row in grid]
    there = [x for row in numbers for x in row if x == x] or [0.0]
    if limits is None:
        reach = max(map(abs, there)) or 1.0
        limits = (-reach, reach) if kind == "diverging" else (min(there), max(there))
    figure, axes = blank(max(4.8, 0.3 * len(cols) + 2.2), max(2.2, 0.3 * len(rows) + 1.3))
    colors = "cividis" if kind == "sequential" else _diverging()
    image = axes.imshow(numbers, aspect="auto", cmap=colors, vmin=limits[0], vmax=limits[1])
    _name_places(axes, cols)
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    _label(axes, title, "", "", grid=False)
    figure.colorbar(image, ax=axes, fraction=0.03, pad=0.02).ax.tick_params(labelsize=7)
    return finish(figure, f"{title}: {len(rows)} rows, {len(cols)} columns")


def heatmaps(
    grids: Mapping[str, Sequence[Sequence[Number]]],
    rows: Sequence[str],
    cols: Sequence[str],
    title: str,
    across: int = 4,
    limits: tuple[Number, Number] | None = None,
    cell: float = 0.075,
) -> Picture:
    """Small grids of colours, one per name, with the same rows, columns and one scale.

    Args:
        across: grids beside each other.
        limits: the numbers at the ends of the scale; 0 and the largest when None.
        cell: inches of a row and of a column; the labels grow with it.

    Raises ValueError without a grid.
    """
    if not grids:
        raise ValueError("grids is empty; give at least one.")
    from matplotlib.figure import Figure

    across = min(across, len(grids))
    down = -(-len(grids) // across)
    largest = max((x for grid in grids.values() for row in grid for x in row), default=0.0)
    low, high = limits or (0.0, largest or 1.0)
    side = [max(1.7, cell * n) for n in (len(cols), len(rows))]
    font = 4 * cell / 0.075  # in points
    size = (across * side[0] + 1.4, down * side[1] + 1.3)
    figure = Figure(figsize=size, facecolor="white", layout="constrained")
    every = figure.subplots(down, across, squeeze=False)
    for axes in every.flat[len(grids) :]:
        axes.set_visible(False)
    for i, (axes, (name, grid)) in enumerate(zip(every.flat, grids.items(), strict=False)):
        image = axes.imshow(grid, aspect="auto", cmap="cividis", vmin=low, vmax=high)
        below, left = (cols if i + across >= len(grids) else []), (rows if not i % across else [])
        axes.set_xticks(range(len(below)), below, rotation=90, fontsize=font)
        axes.set_yticks(range(len(left)), left, fontsize=font)
        axes.set_title(name, fontsize=max(7, font))
    figure.suptitle(_wrapped(title, size[0]), fontsize=10)
    figure.colorbar(image, ax=every, fraction=0.03, pad=0.02).ax.tick_params(labelsize=7)
    return finish(figure, f"{title}: {', '.join(grids)}")


def _numbers(values: Sequence[Number | None]) -> list[float]:
    """Numbers as matplotlib takes them, which leaves a gap at nan."""
    return [float("nan") if value is None else float(value) for value in values]


def _check_ends(
    series: Mapping[str, Sequence[Number | None]], intervals: Mapping[str, Ends]
) -> None:
    """Refuse intervals that belong to no series, or to another number of values."""
    for name, ends in intervals.items():
        if name not in series or any(len(end) != len(series[name]) for end in ends):
            raise ValueError(
                f"the intervals of {name!r} have {len(ends[0])} and {len(ends[1])} ends for "
                f"{len(series.get(name, ()))} values; give one of each per value of a series."
            )


def blank(width: float, height: float) -> tuple["Figure", "Axes"]:
    """An empty white drawing with one pair of axes, bound to no window."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    return figure, figure.add_subplot()


def _diverging() -> "Colormap":
    """The diverging scale of `color_of` for matplotlib."""
    from matplotlib.colors import LinearSegmentedColormap

    ends = [tuple(channel / 255 for channel in color) for color in (ORANGE, NEUTRAL, BLUE)]
    return LinearSegmentedColormap.from_list("orange_blue", ends)


def _name_places(axes: "Axes", names: Sequence[str]) -> None:
    """Names along x, turned where one is too long to stand upright."""
    is_long = max(map(len, names), default=0) > SHORT_NAME
    turned = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"} if is_long else {}
    axes.set_xticks(range(len(names)), names, fontsize=7, **turned)


def _wrapped(title: str, inches: float) -> str:
    """A title in as many lines as it needs."""
    return textwrap.fill(title, int(TITLE_LETTERS * inches))


def _label(axes: "Axes", title: str, x_label: str, y_label: str, grid: bool = True) -> None:
    axes.set_title(_wrapped(title, axes.figure.get_figwidth()), fontsize=10)
    axes.set_xlabel(x_label, fontsize=8)
    axes.set_ylabel(y_label, fontsize=8)
    axes.tick_params(labelsize=7)
    if grid:
        axes.set_axisbelow(True)
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)


def finish(figure: "Figure", alt: str) -> Picture:
    """The drawing as an SVG whose bytes depend on nothing but its contents."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "rlhf_lab", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return Picture(buffer.getvalue(), alt, figure)
