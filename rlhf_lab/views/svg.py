"""SVG drawing of the picture kinds: bars, curves and matrices."""

import math
from collections import defaultdict
from collections.abc import Sequence

from rlhf_lab.views import marks as m
from rlhf_lab.views.pictures import (
    Bars,
    Curves,
    Matrix,
    Number,
    Optionals,
    Picture,
    format_value,
    is_number,
)

PLOT_HEIGHT, SCALE_HEIGHT = 150, 36
MOST_MARKS = 600  # cells


def draw_picture(picture: Bars | Curves | Matrix | Picture) -> Picture:
    """Draw a picture as SVG that needs nothing from outside; a drawing stays unchanged."""
    if isinstance(picture, Picture):
        return picture
    draw = {Bars: draw_bars, Curves: draw_curves}.get(type(picture), draw_matrix)
    if isinstance(picture, Matrix):
        content = f"{len(picture.rows)} rows, {len(picture.names)} columns"
    else:
        over = f" over {picture.x_label}" if isinstance(picture, Curves) else ""
        content = ", ".join(picture.series) + over
    alt = f"{picture.title}: {content}"
    return Picture(m.document(*draw(picture), alt), alt)


class _Axes:
    """A plot area with horizontal grid lines at round numbers, below a header."""

    def __init__(
        self, picture: Bars | Curves, values: Optionals, left: Number, width: Number
    ) -> None:
        there = list(filter(is_number, values)) or [0.0]
        low, high = min(there), max(there)
        if isinstance(picture, Curves):
            pad = 0.06 * (high - low) or abs(high) / 2 or 0.5
            low, high = low - pad, high + pad
        elif low == high:
            high = low + 1.0
        marks = m.ticks(low, high)
        labels = m.tick_labels(marks)
        self.left = max(left, m.widest(labels) + 12)
        self.width, self.low, self.high = width, low, high
        names, whole = list(picture.series), self.left + width
        self.whole = max(whole + 10, 200.0, m.widest(names) + 34 if len(names) > 1 else 0.0)
        head, self.top = m.header(picture.title, picture.unit, names, self.whole)
        self.bottom = self.top + PLOT_HEIGHT
        self.parts = [head]
        for mark, label in zip(marks, labels, strict=True):
            y = self.y(mark)
            line = m.element("line", "axis", x1=self.left, x2=whole, y1=y, y2=y)
            self.parts += [line, m.text(self.left - 5, y + 4, label, "soft", "end")]

    def y(self, value: Number) -> float:
        return self.top + 4 + (self.high - value) / (self.high - self.low) * (PLOT_HEIGHT - 8)


def draw_bars(picture: Bars) -> tuple[Number, Number, str]:
    """Draw groups of bars; labels wider than their group are turned."""
    labels, names = list(map(m.shortened, picture.labels)), list(picture.series)
    bar = 7 if len(names) > 1 else 12
    slot = max(bar * len(names) + 6, min(64.0, 320 / max(1, len(labels))))
    is_turned = m.widest(labels) > slot - 4
    left = max([0.0, *(0.55 * m.text_width(x) - (i + 0.5) * slot for i, x in enumerate(labels))])
    ends = [x for pair in picture.ends.values() for end in pair for x in end]
    values = [x for series in picture.series.values() for x in series]
    axes = _Axes(picture, [0.0, *values, *ends], left * is_turned + 4, slot * len(labels))
    for i, (name, color) in enumerate(zip(names, m.series_colors(names), strict=True)):
        lows, highs = picture.ends.get(name, ([None] * len(labels),) * 2)
        for at, value in enumerate(picture.series[name]):
            if not is_number(value):
                continue
            x = axes.left + (at + 0.5) * slot + (i - len(names) / 2) * bar
            top, height = axes.y(max(value, 0)), abs(axes.y(value) - axes.y(0))
            mark = m.element(
                "rect", f"f{color}", x=x, y=top, width=bar - 1, height=max(height, 0.6)
            )
            if is_number(lows[at]) and is_number(highs[at]):
                middle, y1, y2 = x + (bar - 1) / 2, axes.y(lows[at]), axes.y(highs[at])
                mark += m.element("line", "end", x1=middle, x2=middle, y1=y1, y2=y2)
            label = picture.labels[at] + (f", {name}" if len(names) > 1 else "")
            axes.parts.append(
                m.mark_with_title(mark, format_value(label, value, lows[at], highs[at]))
            )
    below, words = m.labels_below(labels, axes.left, slot, axes.bottom, is_turned)
    return axes.whole, axes.bottom + below, "".join(axes.parts) + words


def _reduced(points: list[tuple]) -> list[tuple]:
    """Points of a curve, of long ones only the lowest and the highest of each stretch."""
    if len(points) <= m.MOST_POINTS:
        return points
    size = -(-2 * len(points) // m.MOST_POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    known = filter(None, ([p for p in part if p[1] is not None] for part in parts))
    pairs = ({pick(part, key=lambda p: p[1]) for pick in (min, max)} for part in known)
    return [p for pair in pairs for p in sorted(pair)]


def draw_curves(picture: Curves) -> tuple[Number, Number, str]:
    """Draw curves, each with its color, dashes and marks, with bands."""
    places = sorted({x for xs, _ in picture.series.values() for x in xs})
    ends = [x for pair in picture.ends.values() for end in pair for x in end]
    axes = _Axes(picture, [*(y for _, ys in picture.series.values() for y in ys), *ends], 0, 370)
    scale = math.log if picture.log_x else float
    low, high = scale(places[0]), scale(places[-1])

    def across(x: Number) -> float:
        middle = 0.5 if low == high else (scale(x) - low) / (high - low)
        return axes.left + 8 + middle * (axes.width - 16)

    whole = all(isinstance(x, int) for x in places)
    marks = places if picture.log_x or len(places) == 1 else m.ticks(places[0], places[-1], 6)
    free = 0.0
    for x in marks:
        words = f"{x:,g}" if picture.log_x else m.round_number(x)
        if (whole and x != round(x)) or across(x) - m.text_width(words) / 2 < free:
            continue
        free = across(x) + m.text_width(words) / 2 + 6
        axes.parts.append(m.text(across(x), axes.bottom + 13, words, "soft", "middle"))
    axes.parts.append(
        m.text(axes.left + axes.width / 2, axes.bottom + 27, picture.x_label, "soft", "middle")
    )
    names = list(picture.series)
    for i, (name, color) in enumerate(zip(names, m.series_colors(names), strict=True)):
        xs, ys = picture.series[name]
        lows, highs = picture.ends.get(name, ([None] * len(ys),) * 2)
        known = [y if is_number(y) else None for y in ys]
        points = _reduced(list(zip(xs, known, lows, highs, strict=True)))
        band = [(across(x), a, b) for x, y, a, b in points if is_number(a) and is_number(b)]
        if len(band) > 1:
            outline = [(x, axes.y(b)) for x, _, b in band] + [
                (x, axes.y(a)) for x, a, _ in band[::-1]
            ]
            axes.parts.append(f'<polygon class="band f{color}" points="{_points(outline)}"/>')
        line: list[tuple[Number, Number]] = []
        for x, y, *_ in [*points, (0, None)]:
            if y is not None:
                line.append((across(x), axes.y(y)))
            elif line:
                dash = m.DASHES[i % len(m.DASHES)]
                dashes = f' stroke-dasharray="{dash}"' if dash else ""
                axes.parts.append(f'<polyline class="s{color}"{dashes} points="{_points(line)}"/>')
                line = []
        size = 2.6 if len(points) <= m.LARGE_POINTS else 1.2
        for x, y, a, b in points:
            if y is not None:
                mark, label = (
                    m.marker(i, across(x), axes.y(y), color, size),
                    f"{name}, {picture.x_label} {x:g}",
                )
                axes.parts.append(m.mark_with_title(mark, format_value(label, y, a, b)))
    return axes.whole, axes.bottom + 36, "".join(axes.parts)


def _points(points: Sequence[tuple[Number, Number]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def draw_matrix(picture: Matrix) -> tuple[Number, Number, str]:
    """Draw a grid of colors below its title and its scale."""
    limits = picture.limits or default_limits(picture.known_values(), picture.kind)
    width, height, grid = matrix_grid(picture, limits)
    width = max(width, 326.0)
    unit = [picture.unit] if picture.unit else []
    unit += ["dashed: beyond the scale"] if ' far"' in grid else []
    head, top = m.header(picture.title, "; ".join(unit), (), width)
    body = head + color_scale(limits, picture.kind, top) + m.moved(grid, 0, top + SCALE_HEIGHT)
    return width, top + SCALE_HEIGHT + height, body


def default_limits(values: Optionals, kind: str) -> tuple[Number, Number]:
    """Return the smallest and largest value, symmetric about 0 for a diverging scale."""
    there = list(filter(is_number, values)) or [0.0]
    reach = max(map(abs, there)) or 1.0
    return (-reach, reach) if kind == "diverging" else (min(there), max(there))


def _fill(value: Number, limits: tuple[Number, Number], kind: str) -> str:
    """Return the attributes of a color: it is denser with the distance from the scale's zero."""
    low, high = limits
    zero = low if kind == "sequential" else (low + high) / 2
    far = value - zero if kind == "sequential" else abs(value - zero)
    size = min(1.0, max(0.0, far / ((high - zero) or 1.0)))
    name = "deep" if kind == "sequential" else "more" if value >= zero else "less"
    return f'fill-opacity="{0.06 + 0.94 * size:.2f}" class="{name}'


def color_scale(limits: tuple[Number, Number], kind: str, y: Number) -> str:
    """Return five tiles of the scale above their numbers."""
    parts, (low, high) = [], limits
    for i in range(5):
        value, x = low + (high - low) * i / 4, 8 + 62 * i
        place = f'x="{x}" y="{y:.0f}" width="62" height="12"'
        parts.append(f'<rect {_fill(value, limits, kind)}" {place}/>')
        parts.append(m.text(x + 31, y + 23, f"{value:.3g}", "soft", "middle"))
    return "".join(parts)


def matrix_grid(
    picture: Matrix, limits: tuple[Number, Number], cell: Number = 0.0
) -> tuple[Number, Number, str]:
    """Return width, height and marks of a grid with labels of rows and columns.

    More than `MOST_MARKS` cells are one mark per color, without titles, as a page has many.
    """
    names = picture.names
    rows, cols = (list(map(m.shortened, found)) for found in (picture.rows, names))
    wide, tall = cell or max(16.0, min(44.0, 420 / max(1, len(names)))), cell or 17.0
    is_large, places, parts = len(rows) * len(names) > MOST_MARKS, defaultdict(list), []
    is_turned = m.widest(cols) > wide - 2
    overhang = [0.55 * m.text_width(x) - (i + 0.5) * wide for i, x in enumerate(cols)]
    left = max(m.widest(rows) + 12, *(overhang if is_turned else []), 6)
    for at, row in enumerate(picture.values):
        y = at * tall
        parts.append(m.text(left - 5, y + tall / 2 + 4, rows[at], "", "end"))
        ends = picture.ends if picture.ends and at < len(picture.ends[0]) else ()
        for i, value in enumerate(row):
            if not is_number(value):
                continue
            fill, x = _fill(value, limits, picture.kind), left + i * wide
            if is_large:
                path = f"M{x:.0f} {y:.0f}h{wide - 1:.0f}v{tall - 1:.0f}h{1 - wide:.0f}z"
                places[fill].append(path)
                continue
            far, beyond = "", ""
            if not limits[0] <= value <= limits[1]:
                far, beyond = " far", ", beyond the scale"
            size = f'width="{wide - 1:.1f}" height="{tall - 1:.1f}"'
            mark = f'<rect {fill}{far}" x="{x:.1f}" y="{y:.1f}" {size}/>'
            title = format_value(
                f"{picture.rows[at]}, {names[i]}", value, *(g[at][i] for g in ends)
            )
            parts.append(m.mark_with_title(mark, title + beyond))
    parts += [f'<path {fill}" d="{"".join(found)}"/>' for fill, found in places.items()]
    bottom = tall * len(rows)
    below, labels = m.labels_below(cols, left, wide, bottom, is_turned)
    return left + wide * len(names) + 10, bottom + below, "".join(parts) + labels
