"""SVG drawing of matrices: a grid of colors with its scale, and the stored number of each cell."""

from collections import defaultdict
from collections.abc import Sequence

from rlhf_lab.views.color import color_of, css, ink_on
from rlhf_lab.views.marks import (
    header,
    mark_with_title,
    shortened,
    text,
    text_width,
    widest,
)
from rlhf_lab.views.pictures import Matrix, Number, Optionals, format_value, is_number

MOST_MARKS = 600  # cells


def draw_matrix(picture: Matrix) -> tuple[Number, Number, str]:
    """Draw a grid of colors below its title and its scale."""
    limits = picture.limits or default_limits(picture.values, picture.kind)
    width, height, grid = matrix_grid(picture, limits)
    width = max(width, 260.0)
    unit = [picture.unit] if picture.unit else []
    unit += ["dashed: beyond the scale"] if 'class="far"' in grid else []
    head, top = header(picture.title, "; ".join(unit), (), width)
    scale = color_scale(picture, limits, 8, top)
    return (
        width,
        top + 26 + height,
        f'{head}{scale}<g transform="translate(0 {top + 26:.0f})">{grid}</g>',
    )


def default_limits(rows: Sequence[Optionals], kind: str) -> tuple[Number, Number]:
    """Return the smallest and largest value, symmetric about 0 for a diverging scale."""
    there = [x for row in rows for x in row if is_number(x)] or [0.0]
    reach = max(map(abs, there)) or 1.0
    return (-reach, reach) if kind == "diverging" else (min(there), max(there))


def _color(value: Number, limits: tuple[Number, Number], kind: str) -> tuple[int, int, int]:
    low, high = limits
    if kind == "sequential":
        return color_of(value - low, (high - low) or 1.0, kind)
    return color_of(value - (low + high) / 2, (high - low) / 2, kind)


def color_scale(picture: Matrix, limits: tuple[Number, Number], x: Number, y: Number) -> str:
    """Return five tiles of the scale with their numbers."""
    parts, (low, high) = [], limits
    for i in range(5):
        value = low + (high - low) * i / 4
        color = _color(value, limits, picture.kind)
        tile = f'x="{x + 48 * i:.0f}" y="{y:.0f}" width="48" height="16"'
        parts.append(f'<rect fill="{css(color)}" {tile}/>')
        place = f'x="{x + 48 * i + 24:.0f}" y="{y + 12:.0f}" text-anchor="middle"'
        parts.append(f'<text {place}><tspan fill="{css(ink_on(color))}">{value:.3g}</tspan></text>')
    return "".join(parts)


def matrix_grid(
    picture: Matrix, limits: tuple[Number, Number], cell: Number = 0.0, labels: str = "both"
) -> tuple[Number, Number, str]:
    """Return width, height and marks of a grid; `labels` are both, rows, cols or none.

    More than `MOST_MARKS` cells are one mark per color, without titles, as a page has many.
    """
    rows = [shortened(x) for x in picture.rows] if labels in ("both", "rows") else []
    cols = [shortened(x) for x in picture.cols] if labels in ("both", "cols") else []
    wide = cell or max(16.0, min(44.0, 420 / max(1, len(picture.cols))))
    tall, parts = cell or 17.0, []
    is_large, places = len(picture.rows) * len(picture.cols) > MOST_MARKS, defaultdict(list)
    is_turned = widest(cols) > wide - 2
    overhang = [0.55 * text_width(x) - (i + 0.5) * wide for i, x in enumerate(cols)]
    left = max(widest(rows) + 12, *(overhang if is_turned else []), 6)
    for at, name in enumerate(picture.rows):
        y = at * tall
        if rows:
            parts.append(text(left - 5, y + tall / 2 + 4, rows[at], "", "end"))
        for i, value in enumerate(picture.values[at]):
            if not is_number(value):
                continue
            color = _color(value, limits, picture.kind)
            x = left + i * wide
            if is_large:
                places[color].append(
                    f"M{x:.0f} {y:.0f}h{wide - 1:.0f}v{tall - 1:.0f}h{1 - wide:.0f}z"
                )
                continue
            is_far = not limits[0] <= value <= limits[1]
            far, beyond = (' class="far"', ", beyond the scale") if is_far else ("", "")
            size = f'width="{wide - 1:.1f}" height="{tall - 1:.1f}"'
            mark = f'<rect fill="{css(color)}"{far} x="{x:.1f}" y="{y:.1f}" {size}/>'
            title = format_value(f"{name}, {picture.cols[i]}", value) + beyond
            parts.append(mark_with_title(mark, title))
    parts += [
        f'<path fill="{css(color)}" d="{"".join(found)}"/>' for color, found in places.items()
    ]
    for i, name in enumerate(cols):
        x, y = left + (i + 0.5) * wide, tall * len(picture.rows)
        parts.append(
            text(x + 4, y + 9, name, "", "end", -60)
            if is_turned
            else text(x, y + 13, name, "", "middle")
        )
    below = 0.0 if not cols else 0.87 * widest(cols) + 20 if is_turned else 22.0
    return left + wide * len(picture.cols) + 10, tall * len(picture.rows) + below, "".join(parts)
