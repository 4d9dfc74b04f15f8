"""Bars, curves and heatmaps as static SVG, with the stored number in the title of each mark."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any

from jaxtyping import Float
from torch import Tensor

from rlhf_lab.views import marks as m
from rlhf_lab.views.marks import Kind, Names, Number, Optionals
from rlhf_lab.views.pictures import Picture

Curve = tuple[Sequence[Number], Optionals]
Ends = tuple[Optionals, Optionals]  # the lower and the upper ends of intervals
Limits = tuple[Number, Number]  # the ends of a scale
NO_ENDS: Mapping[str, Ends] = MappingProxyType({})
SIDE, WIDEST = 11, 1000  # pixels of a cell of several grids, and of all of them
PLOT_HEIGHT, SCALE_WIDTH = 150, 326.0
MOST_MARKS = 600  # cells
MOST_POINTS, LARGE_POINTS = 400, 30  # a longer curve is reduced to minima and maxima


def curves(
    series: Mapping[str, Curve],
    title: str,
    x_label: str = "phase",
    y_label: str = "",
    bands: Mapping[str, Ends] = NO_ENDS,
    note: str = "",
) -> Picture:
    """Plot curves over phases, each with its color, dashes and marks.

    Gaps are left where a value is None; integers along x have ticks at integers only.

    Args:
        bands: intervals of some of the curves, by name.
    """
    rows = _points({name: y for name, (_, y) in series.items()}, bands)
    all_x = {name: _numbers(x) for name, (x, _) in series.items()}
    places = sorted({x for xs in all_x.values() for x in xs})
    finite = _finite(rows)
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    pad = 0.06 * (high - low) or abs(high) / 2 or 0.5
    axes = _Axes(title, y_label, list(series), [low - pad, high + pad], 0, 370)
    low, high = places[0], places[-1]

    def across(x: Number) -> float:
        middle = 0.5 if low == high else (x - low) / (high - low)
        return axes.left + 8 + middle * (axes.width - 16)

    whole, free = all(isinstance(x, int) for x in places), 0.0
    for x in places if low == high else m.ticks(low, high, 6):
        words = m.tick_labels([x])[0]
        if (whole and x != round(x)) or across(x) - m.text_width(words) / 2 < free:
            continue
        free = across(x) + m.text_width(words) / 2 + 6
        axes.parts.append(m.text(across(x), axes.bottom + 13, words, "soft", "middle"))
    middle = axes.left + axes.width / 2
    axes.parts.append(m.text(middle, axes.bottom + 27, x_label, "soft", "middle"))
    for i, (name, color) in enumerate(zip(series, m.series_colors(list(series)), strict=True)):
        pairs = zip(all_x[name], rows[name], strict=True)
        points = _reduced([(x, *point) for x, point in pairs])
        band = [(across(x), *map(axes.y, ab)) for x, _, *ab in points if None not in ab]
        if len(band) > 1:
            outline = [(x, y) for x, _, y in band] + [(x, y) for x, y, _ in band[::-1]]
            axes.parts.append(f'<polygon class="band f{color}" points="{_listed(outline)}"/>')
        dashes = f' stroke-dasharray="{m.DASHES[i % 4]}"' if i % 4 else ""
        for is_known, group in groupby(points, key=lambda point: point[1] is not None):
            if is_known:
                line = _listed([(across(x), axes.y(y)) for x, y, *_ in group])
                axes.parts.append(f'<polyline class="s{color}"{dashes} points="{line}"/>')
        size = 2.6 if len(points) <= LARGE_POINTS else 1.2
        for x, y, *ab in points:
            if y is not None:
                mark = m.marker(i, across(x), axes.y(y), color, size)
                axes.parts.append(m.titled(mark, f"{name}, {x_label} {x:g}", y, *ab))
    alt, size = f"{title}: {', '.join(series)} over {x_label}", (axes.whole, axes.bottom + 36)
    return Picture(size, axes.parts, alt, title, y_label, note, finite)


def bars(
    names: Names,
    series: Mapping[str, Optionals],
    title: str,
    y_label: str = "",
    whiskers: Mapping[str, Ends] = NO_ENDS,
    note: str = "",
) -> Picture:
    """Plot groups of bars, one group per name; names wider than their group are turned.

    Args:
        whiskers: intervals of some of the series, by name.
    """
    rows, labels = _points(series, whiskers), list(map(m.shortened, names))
    bar = 7 if len(series) > 1 else 12
    slot = max(bar * len(series) + 6, min(64.0, 320 / max(1, len(names))))
    is_turned = m.widest(labels) > slot - 4
    left = max([0.0, *(0.55 * m.text_width(x) - (i + 0.5) * slot for i, x in enumerate(labels))])
    finite, left = _finite(rows), left * is_turned + 4
    axes = _Axes(title, y_label, list(series), [0.0, *finite], left, slot * len(names))
    for i, (name, color) in enumerate(zip(series, m.series_colors(list(series)), strict=True)):
        for at, (group, (value, *ab)) in enumerate(zip(names, rows[name], strict=True)):
            if value is None:
                continue
            x = axes.left + (at + 0.5) * slot + (i - len(series) / 2) * bar
            place = {"x": x, "y": axes.y(max(value, 0)), "width": bar - 1}
            height = max(abs(axes.y(value) - axes.y(0)), 0.6)
            mark = m.element("rect", f"f{color}", **place, height=height)
            if None not in ab:
                middle, (y1, y2) = x + (bar - 1) / 2, map(axes.y, ab)
                mark += m.element("line", "end", x1=middle, x2=middle, y1=y1, y2=y2)
            label = group + (f", {name}" if len(series) > 1 else "")
            axes.parts.append(m.titled(mark, label, value, *ab))
    below, words = m.labels_below(labels, axes.left, slot, axes.bottom, is_turned)
    alt, size = f"{title}: {', '.join(series)}", (axes.whole, axes.bottom + below)
    return Picture(size, [*axes.parts, words], alt, title, y_label, note, finite)


def heatmap(
    values: Float[Tensor, "rows cols"] | Sequence[Optionals],
    rows: Names,
    cols: Names,
    title: str,
    kind: Kind = "sequential",
    limits: Limits | None = None,
    unit: str = "",
    ends: tuple[Sequence[Optionals], Sequence[Optionals]] = ((), ()),
    note: str = "",
) -> Picture:
    """Plot a grid of colors with its scale; entries that are None stay blank.

    Columns are named by their numbers if `cols` has not one name for each.

    Args:
        limits: the ends of the scale, by default those of the values, symmetric about 0 if
            diverging.
        ends: lower and upper ends of the intervals of the first rows.
    """
    grid = list(map(_numbers, values))
    numbers = [x for row in grid for x in row]
    n = max(map(len, grid), default=0)
    cols = cols if len(cols) == n else list(map(str, range(n)))
    limits = limits or default_limits(numbers, kind)
    width, height, marks = _grid(grid, rows, cols, kind, limits, ends)
    beyond = ["dashed: beyond the scale"] if ' far"' in marks else []
    legend, width = "; ".join([unit] * bool(unit) + beyond), max(width, SCALE_WIDTH)
    parts, top = _header_with_scale(title, legend, limits, kind, width)
    alt = f"{title}: {len(rows)} rows, {n} columns"
    parts.append(m.moved(marks, 0, top))
    return Picture((width, top + height), parts, alt, title, unit, note, numbers)


def heatmaps(
    grids: Mapping[str, Sequence[Sequence[Number]]],
    rows: Names,
    cols: Names,
    title: str,
    across: int = 4,
    limits: Limits | None = None,
) -> Picture:
    """Plot grids of the same rows and columns with one scale, at most `across` in a row.

    The scale is from 0 to the largest number if limits is None.
    """
    grids = {name: list(map(_numbers, grid)) for name, grid in grids.items()}
    numbers = [x for grid in grids.values() for row in grid for x in row]
    limits = limits or (0.0, default_limits(numbers, "sequential")[1] or 1)
    drawn = [_grid(g, rows, cols, "sequential", limits, cell=SIDE) for g in grids.values()]
    wide = max(max(width for width, *_ in drawn), m.widest(list(grids)) + 12)
    tall, across = drawn[0][1] + 26, max(1, min(across, len(grids), int(WIDEST // wide)))
    whole = max(SCALE_WIDTH, across * wide)
    parts, top = _header_with_scale(title, "", limits, "sequential", whole)
    for i, (name, (_, _, grid)) in enumerate(zip(grids, drawn, strict=True)):
        x, y = i % across * wide, top + i // across * tall
        parts += [m.text(x + 8, y + 10, name), m.moved(grid, x, y + 16)]
    height = top - (-len(grids) // across) * tall
    return Picture((whole, height), parts, f"{title}: {', '.join(grids)}", title)


class _Axes:
    """A plot area with horizontal grid lines at round numbers, below a header."""

    def __init__(
        self, title: str, unit: str, names: Names, values: list[Number], left: Number, width: Number
    ) -> None:
        names = names if len(names) > 1 else []
        self.low, self.high = min(values), max(values)
        self.high += self.low == self.high
        marks = m.ticks(self.low, self.high)
        labels = m.tick_labels(marks)
        self.left, self.width = max(left, m.widest(labels) + 12), width
        end = self.left + width
        self.whole = max(end + 10, 200.0, m.widest(names) + 34 if names else 0.0)
        head, self.top = m.header(title, unit, names, self.whole)
        self.bottom, self.parts = self.top + PLOT_HEIGHT, [head]
        for mark, label in zip(marks, labels, strict=True):
            y = self.y(mark)
            self.parts.append(m.element("line", "axis", x1=self.left, x2=end, y1=y, y2=y))
            self.parts.append(m.text(self.left - 5, y + 4, label, "soft", "end"))

    def y(self, value: Number) -> float:
        return self.top + 4 + (self.high - value) / (self.high - self.low) * (PLOT_HEIGHT - 8)


def _grid(
    values: Sequence[Optionals],
    rows: Names,
    cols: Names,
    kind: str,
    limits: Limits,
    ends: tuple[Sequence[Optionals], Sequence[Optionals]] = ((), ()),
    cell: Number = 0.0,
) -> tuple[Number, Number, str]:
    """Return width, height and marks of a grid with labels of rows and columns.

    More than `MOST_MARKS` cells are one mark per color, without titles, as a page has many.
    """
    left_labels, below = (list(map(m.shortened, names)) for names in (rows, cols))
    wide, tall = cell or max(16.0, min(44.0, 420 / max(1, len(cols)))), cell or 17.0
    is_large, places, parts = len(rows) * len(cols) > MOST_MARKS, defaultdict(list), []
    is_turned = m.widest(below) > wide - 2
    overhang = [0.55 * m.text_width(x) - (i + 0.5) * wide for i, x in enumerate(below)]
    left = max(m.widest(left_labels) + 12, *(overhang if is_turned else []), 6)
    for at, row in enumerate(values):
        y = at * tall
        parts.append(m.text(left - 5, y + tall / 2 + 4, left_labels[at], "", "end"))
        for i, value in enumerate(row):
            if value is None:
                continue
            fill, x = _fill(value, limits, kind), left + i * wide
            if is_large:
                path = f"M{x:.0f} {y:.0f}h{wide - 1:.0f}v{tall - 1:.0f}h{1 - wide:.0f}z"
                places[fill].append(path)
                continue
            is_far, size = not limits[0] <= value <= limits[1], (wide - 1, tall - 1)
            place = 'x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"'.format(x, y, *size)
            mark = f'<rect {fill}{" far" * is_far}" {place}/>'
            ab = [end[at][i] if at < len(end) else None for end in ends]
            beyond = ", beyond the scale" * is_far
            parts.append(m.titled(mark, f"{rows[at]}, {cols[i]}", value, *ab, beyond))
    parts += [f'<path {fill}" d="{"".join(found)}"/>' for fill, found in places.items()]
    height, labels = m.labels_below(below, left, wide, tall * len(rows), is_turned)
    return left + wide * len(cols) + 10, tall * len(rows) + height, "".join(parts) + labels


def default_limits(values: Optionals, kind: str) -> tuple[Number, Number]:
    """Return the smallest and largest value, symmetric about 0 for a diverging scale."""
    finite = [x for x in values if x is not None] or [0.0]
    reach = max(map(abs, finite)) or 1.0
    return (-reach, reach) if kind == "diverging" else (min(finite), max(finite))


def _fill(value: Number, limits: Limits, kind: str) -> str:
    """Return the attributes of a color: it is denser with the distance from the scale's zero."""
    low, high = limits
    zero = low if kind == "sequential" else (low + high) / 2
    far = value - zero if kind == "sequential" else abs(value - zero)
    size = min(1.0, max(0.0, far / ((high - zero) or 1.0)))
    name = "deep" if kind == "sequential" else "more" if value >= zero else "less"
    return f'fill-opacity="{0.06 + 0.94 * size:.2f}" class="{name}'


def _header_with_scale(
    title: str, legend: str, limits: Limits, kind: str, width: Number
) -> tuple[list[str], Number]:
    """Return a header above the scale of a grid, and the height that they take."""
    (head, y), (low, high) = m.header(title, legend, (), width), limits
    parts = [head]
    for i in range(5):
        value, x = low + (high - low) * i / 4, 8 + 62 * i
        place = f'x="{x}" y="{y:.0f}" width="62" height="12"'
        parts.append(f'<rect {_fill(value, limits, kind)}" {place}/>')
        parts.append(m.text(x + 31, y + 23, f"{value:.3g}", "soft", "middle"))
    return parts, y + 36


def _numbers(values: Iterable[Any]) -> list[Number | None]:
    """Return numbers, None for a missing or infinite one."""
    plain = (x.item() if hasattr(x, "item") else x for x in values)
    return [x if m.is_number(x) else None for x in plain]


def _points(series: Mapping[str, Optionals], intervals: Mapping[str, Ends]) -> dict[str, list]:
    """Return values with the ends of their intervals, by series."""
    found = {}
    for name, values in series.items():
        ends = intervals.get(name, ([None] * len(values),) * 2)
        found[name] = list(zip(*map(_numbers, (values, *ends)), strict=True))
    return found


def _finite(rows: Mapping[str, list]) -> list[Number]:
    return [x for points in rows.values() for point in points for x in point if x is not None]


def _reduced(points: list[tuple]) -> list[tuple]:
    """Return the points of a curve, of long ones the lowest and the highest of each stretch."""
    if len(points) <= MOST_POINTS:
        return points
    size = -(-2 * len(points) // MOST_POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    known = filter(None, ([p for p in part if p[1] is not None] for part in parts))
    pairs = ({pick(part, key=lambda p: p[1]) for pick in (min, max)} for part in known)
    return [p for pair in pairs for p in sorted(pair)]


def _listed(points: Sequence[tuple[Number, Number]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
