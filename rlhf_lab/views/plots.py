"""Bars, curves and heatmaps as static SVG, with the stored number in the title of each mark."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any

from jaxtyping import Float
from markupsafe import Markup
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
    all_x = {name: _numbers(x) for name, (x, _) in series.items()}
    places = sorted({x for xs in all_x.values() for x in xs})
    low, high = places[0], places[-1]
    axes = _Axes(title, y_label, {name: y for name, (_, y) in series.items()}, bands, 0.0, 370.0)
    middle, step = axes.left + axes.width / 2, (axes.width - 16) / ((high - low) or 1.0)
    across = lambda x: middle + (x - (low + high) / 2) * step
    whole, free = all(isinstance(x, int) for x in places), 0.0
    for x, words in (m.ticks(low, high, 6) or {low: f"{low:.4g}"}).items():
        half = m.text_width(words) / 2
        if (whole and x != round(x)) or across(x) - half < free:
            continue
        free = across(x) + half + 6
        axes.parts.append(m.text(across(x), axes.bottom + 13, words, "soft", "middle"))
    axes.parts.append(m.text(middle, axes.bottom + 27, x_label, "soft", "middle"))
    for i, (name, color) in enumerate(zip(series, m.series_colors(list(series)), strict=True)):
        pairs = zip(all_x[name], axes.rows[name], strict=True)
        points = _reduced([(x, *point) for x, point in pairs])
        band = [(across(x), *map(axes.y, ab)) for x, _, *ab in points if None not in ab]
        if len(band) > 1:
            outline = [(x, y) for x, _, y in band] + [(x, y) for x, y, _ in band[::-1]]
            axes.parts.append(m.tag("polygon", class_=f"band f{color}", points=_listed(outline)))
        look = {"class_": f"s{color}", "stroke_dasharray": m.DASHES[i % 4]}
        for is_known, group in groupby(points, key=lambda point: point[1] is not None):
            if is_known:
                line = _listed([(across(x), axes.y(y)) for x, y, *_ in group])
                axes.parts.append(m.tag("polyline", **look, points=line))
        size = 2.6 if len(points) <= LARGE_POINTS else 1.2
        for x, y, *ab in points:
            if y is not None:
                mark = m.marker(i, across(x), axes.y(y), color, size)
                axes.parts.append(m.titled(mark, f"{name}, {x_label} {x:g}", y, *ab))
    alt, size = f"{title}: {', '.join(series)} over {x_label}", (axes.whole, axes.bottom + 36)
    return Picture(size, axes.parts, alt, title, y_label, note, axes.values)


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
    bar = 7.0 if len(series) > 1 else 12.0
    slot = max(bar * len(series) + 6, min(64.0, 320 / max(1, len(names))))
    overhang, below, labels = m.labels_below(names, slot)
    left, width = overhang + 4, slot * len(names)
    axes = _Axes(title, y_label, series, whiskers, left, width, has_zero=True)
    for i, (name, color) in enumerate(zip(series, m.series_colors(list(series)), strict=True)):
        for at, (group, (value, *ab)) in enumerate(zip(names, axes.rows[name], strict=True)):
            if value is None:
                continue
            x = axes.left + (at + 0.5) * slot + (i - len(series) / 2) * bar
            place = {"x": x, "y": axes.y(max(value, 0)), "width": bar - 1}
            height = max(abs(axes.y(value) - axes.y(0)), 0.6)
            mark = m.tag("rect", class_=f"f{color}", **place, height=height)
            if None not in ab:
                middle, (y1, y2) = x + (bar - 1) / 2, map(axes.y, ab)
                mark += m.tag("line", class_="end", x1=middle, x2=middle, y1=y1, y2=y2)
            label = group + (f", {name}" if len(series) > 1 else "")
            axes.parts.append(m.titled(mark, label, value, *ab))
    place = f"translate({axes.left:.1f} {axes.bottom:.1f})"
    axes.parts.append(m.tag("g", *labels, transform=place))
    alt, size = f"{title}: {', '.join(series)}", (axes.whole, axes.bottom + below)
    return Picture(size, axes.parts, alt, title, y_label, note, axes.values)


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
    beyond = ["dashed: beyond the scale"] if any(' far"' in mark for mark in marks) else []
    legend = "; ".join([unit] * bool(unit) + beyond)
    width, alt = max(width, SCALE_WIDTH), f"{title}: {len(rows)} rows, {n} columns"
    parts, top = _header_with_scale(title, legend, limits, kind, width)
    parts.append(m.tag("g", *marks, transform=f"translate(0.0 {top:.1f})"))
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
    wide = max(max(width for width, *_ in drawn), m.text_width(*grids) + 12)
    tall, across = drawn[0][1] + 26, max(1, min(across, len(grids), int(WIDEST // wide)))
    whole = max(SCALE_WIDTH, across * wide)
    parts, top = _header_with_scale(title, "", limits, "sequential", whole)
    for i, (name, (_, _, marks)) in enumerate(zip(grids, drawn, strict=True)):
        x, y = i % across * wide, top + i // across * tall
        parts.append(m.text(x + 8, y + 10, name))
        parts.append(m.tag("g", *marks, transform=f"translate({x:.1f} {y + 16:.1f})"))
    height = top - (-len(grids) // across) * tall
    return Picture((whole, height), parts, f"{title}: {', '.join(grids)}", title)


class _Axes:
    """A plot area with horizontal grid lines at round numbers, below a header.

    `rows` has the values of each series, with the ends of their intervals.
    """

    def __init__(
        self,
        title: str,
        unit: str,
        series: Mapping[str, Optionals],
        intervals: Mapping[str, Ends],
        left: Number,
        width: Number,
        has_zero: bool = False,
    ) -> None:
        self.width, self.rows = width, {}
        for name, values in series.items():
            ends = intervals.get(name, ([None] * len(values),) * 2)
            self.rows[name] = list(zip(*map(_numbers, (values, *ends)), strict=True))
        points = [point for row in self.rows.values() for point in row]
        self.values = [x for point in points for x in point if x is not None]
        values = [0.0, *self.values] if has_zero or not self.values else self.values
        low, high = min(values), max(values)
        pad = 0.0 if has_zero else 0.06 * (high - low) or abs(high) / 2 or 0.5
        self.low, self.high = low - pad, high + pad + (has_zero and low == high)
        ticks, names = m.ticks(self.low, self.high), list(series) if len(series) > 1 else []
        self.left = max(left, m.text_width(*ticks.values()) + 12)
        end = self.left + self.width
        self.whole = max(end + 10, 200.0, m.text_width(*names) + 34 if names else 0.0)
        self.parts, self.top = m.header(title, unit, names, self.whole)
        self.bottom = self.top + PLOT_HEIGHT
        for tick, label in ticks.items():
            y = self.y(tick)
            self.parts.append(m.tag("line", class_="axis", x1=self.left, x2=end, y1=y, y2=y))
            self.parts.append(m.text(self.left - 5, y + 4, label, "soft", "end"))

    def y(self, value: Number) -> Number:
        return self.top + 4 + (self.high - value) / (self.high - self.low) * (PLOT_HEIGHT - 8)


def _grid(
    values: Sequence[Optionals],
    rows: Names,
    cols: Names,
    kind: str,
    limits: Limits,
    ends: tuple[Sequence[Optionals], Sequence[Optionals]] = ((), ()),
    cell: Number = 0.0,
) -> tuple[Number, Number, list[Markup]]:
    """Return width, height and marks of a grid with labels of rows and columns.

    More than `MOST_MARKS` cells are one mark per color, without titles, as a page has many.
    """
    wide, tall = cell or max(16.0, min(44.0, 420 / max(1, len(cols)))), cell or 17.0
    overhang, below, labels = m.labels_below(cols, wide)
    left, bottom = max(m.text_width(*rows) + 12, overhang), tall * len(rows)
    low, high = (list(map(_numbers, end)) for end in ends)
    is_large, paths, parts = len(rows) * len(cols) > MOST_MARKS, defaultdict(str), []
    for at, (name, row) in enumerate(zip(rows, values, strict=True)):
        y = at * tall
        parts.append(m.text(left - 5, y + tall / 2 + 4, name, "", "end"))
        for i, value in enumerate(row):
            if value is None:
                continue
            color, x = _color(value, limits, kind), left + i * wide
            if is_large:
                paths[color] += f"M{x:.0f} {y:.0f}h{wide - 1:.0f}v{tall - 1:.0f}h{1 - wide:.0f}z"
                continue
            is_far = not limits[0] <= value <= limits[1]
            look = {"class_": color[0] + " far" * is_far, "fill_opacity": color[1]}
            mark = m.tag("rect", **look, x=x, y=y, width=wide - 1, height=tall - 1)
            ab = [end[at][i] if at < len(end) else None for end in (low, high)]
            beyond = ", beyond the scale" * is_far
            parts.append(m.titled(mark, f"{name}, {cols[i]}", value, *ab, more=beyond))
    parts += [m.tag("path", class_=c, fill_opacity=o, d=d) for (c, o), d in paths.items()]
    parts.append(m.tag("g", *labels, transform=f"translate({left:.1f} {bottom:.1f})"))
    return left + wide * len(cols) + 10, bottom + below, parts


def default_limits(values: Optionals, kind: str) -> Limits:
    """Return the smallest and largest value, symmetric about 0 for a diverging scale."""
    finite = [x for x in values if x is not None] or [0.0]
    reach = max(map(abs, finite)) or 1.0
    return (-reach, reach) if kind == "diverging" else (min(finite), max(finite))


def _color(value: Number, limits: Limits, kind: str) -> tuple[str, str]:
    """Return the class and the opacity of a color: denser with the distance from zero."""
    low, high = limits
    zero = low if kind == "sequential" else (low + high) / 2
    far = value - zero if kind == "sequential" else abs(value - zero)
    size = min(1.0, max(0.0, far / ((high - zero) or 1.0)))
    name = "deep" if kind == "sequential" else "more" if value >= zero else "less"
    return name, f"{0.06 + 0.94 * size:.2f}"


def _header_with_scale(
    title: str, legend: str, limits: Limits, kind: str, width: Number
) -> tuple[list[Markup], Number]:
    """Return a header above the scale of a grid, and the height that they take."""
    (parts, y), (low, high) = m.header(title, legend, (), width), limits
    for i in range(5):
        value, x = low + (high - low) * i / 4, 8 + 62 * i
        name, opacity = _color(value, limits, kind)
        look = {"class_": name, "fill_opacity": opacity, "width": 62, "height": 12}
        parts.append(m.tag("rect", **look, x=x, y=y))
        parts.append(m.text(x + 31, y + 23, f"{value:.3g}", "soft", "middle"))
    return parts, y + 36


def _numbers(values: Iterable[Any]) -> list[Number | None]:
    """Return numbers, None for a missing or infinite one."""
    plain = (x.item() if hasattr(x, "item") else x for x in values)
    return [x if x is not None and math.isfinite(x) else None for x in plain]


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
