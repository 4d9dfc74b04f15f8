"""Colors and elements of SVG drawings; each mark has its stored number in its title."""

import math
import textwrap
from collections.abc import Sequence
from typing import Literal
from unicodedata import east_asian_width

from markupsafe import Markup, escape
from rich.color import ColorTriplet, blend_rgb

from rlhf_lab.views.templates import read_web

Kind = Literal["diverging", "sequential"]
Number = float | int
Optionals = Sequence[Number | None]
Names = Sequence[str]
Size = tuple[Number, Number]  # width and height in pixels
ORANGE, NEUTRAL = ColorTriplet(213, 94, 0), ColorTriplet(242, 242, 242)
BLUE, DEEP = ColorTriplet(0, 114, 178), ColorTriplet(0, 78, 124)
N_COLORS = 8  # classes f0 to f7 (fill) and s0 to s7 (stroke) in picture.css
COLOR_OF_NAME = {  # one color per quantity on the whole page
    **{"exact": 0, "k1": 1, "k2": 2, "k3": 3, "mean reward": 0, "reward": 0, "true reward": 4},
    **{"policy": 1, "reference": 5, "value": 2, "own weights": 0, "unembedding": 3},
}
DASHES = ("", "6 3", "2 2", "8 2 2 2")
SVG_STYLE = read_web("picture.css").replace("\n", "")


def pick_color(value: Number, limit: Number, kind: Kind = "diverging") -> ColorTriplet:
    """Return the color of a number; beyond the limit it stays that of the limit, nan is 0.

    Diverging: orange at -limit, nearly white at 0, blue at limit (Okabe and Ito 2008).
    Sequential: nearly white at 0, deep blue at limit.
    """
    size = 0.0 if limit <= 0 or math.isnan(value) else max(-1.0, min(1.0, value / limit))
    if kind == "sequential":
        return blend_rgb(NEUTRAL, DEEP, max(0.0, size))
    return blend_rgb(NEUTRAL, BLUE if size > 0 else ORANGE, abs(size))


def ink_on(background: ColorTriplet) -> ColorTriplet:
    """Return black or white, whose contrasts are equal at a luminance of 0.179 (WCAG 2.2)."""
    parts = background.normalized
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return ColorTriplet(0, 0, 0) if luminance > 0.179 else ColorTriplet(255, 255, 255)


def series_colors(names: Names) -> list[int]:
    known = [COLOR_OF_NAME.get(name.partition(",")[0]) for name in names]
    known = [color if color not in known[:i] else None for i, color in enumerate(known)]
    free = [i for i in range(N_COLORS) if i not in known] or [0]
    others = iter(free * (len(names) // len(free) + 1))
    return [next(others) if color is None else color for color in known]


def tag(name: str, *content: str, **attributes: Number | str) -> Markup:
    """Return an SVG element of escaped texts and elements; floats have one decimal.

    In the name of an attribute, _ is a hyphen, or nothing at the end; empty ones are left out.
    """
    listed = ""
    for key, value in attributes.items():
        value = f"{value:.1f}" if isinstance(value, float) else escape(value)
        listed += f' {key.strip("_").replace("_", "-")}="{value}"' * bool(value)
    inside = "".join(map(escape, content)).replace("\n", "↵")
    return Markup(f"<{name}{listed}>{inside}</{name}>" if inside else f"<{name}{listed}/>")


def text(x: Number, y: Number, words: str, kind: str = "", anchor: str = "") -> Markup:
    """Return a text; `anchor` is empty, middle or end."""
    return tag("text", words, x=x, y=y, class_=kind, text_anchor=anchor)


def titled(mark: str, label: str, value: Number, *ends: Number | None, more: str = "") -> Markup:
    """Return a mark whose tooltip is its label, the stored number and the interval."""
    interval = "" if None in ends or not ends else " [{:.9g}, {:.9g}]".format(*ends)
    return tag("g", tag("title", f"{label}: {value:.9g}{interval}{more}"), mark)


def marker(i: int, x: Number, y: Number, color: int, r: Number) -> Markup:
    """Return a circle, square, triangle or diamond, by the number of the series."""
    if i % 4 == 0:
        return tag("circle", class_=f"f{color}", cx=x, cy=y, r=r)
    shape = {
        1: f"M-{r:g}-{r:g}h{2 * r:g}v{2 * r:g}h-{2 * r:g}z",
        2: f"M0-{1.2 * r:g}L{1.2 * r:g} {r:g}H-{1.2 * r:g}z",
        3: f"M0-{1.3 * r:g}L{1.3 * r:g} 0L0 {1.3 * r:g}L-{1.3 * r:g} 0z",
    }[i % 4]
    return tag("path", class_=f"f{color}", d=shape, transform=f"translate({x:.1f} {y:.1f})")


def text_width(*texts: str) -> Number:
    """Return an upper estimate of the width of the widest text at 11 pixels, in any font."""
    wide = lambda x: x in "mwMW@%—" or east_asian_width(x) in "WF"
    thin = lambda x: x in "iljtfrI.,:;'|!()[] "
    letter = lambda x: 11.2 if wide(x) else 4.6 if thin(x) else 7.1 + 1.1 * x.isupper()
    return max((sum(map(letter, text)) for text in texts), default=0.0)


def labels_below(names: Names, wide: Number) -> tuple[Number, Number, list[Markup]]:
    """Return overhang at the left, height and labels below columns that start at 0.

    Labels are turned if one is wider than a column.
    """
    labels, width = [((i + 0.5) * wide, label) for i, label in enumerate(names)], text_width(*names)
    if width <= wide - 3:
        return 0.0, 22.0, [text(x, 13, label, "", "middle") for x, label in labels]
    overhang = max([0.0, *(0.55 * text_width(label) - x for x, label in labels)])
    turn = "translate({:.1f} 8.0)rotate(-60)"
    turned = [tag("text", x, transform=turn.format(at + 4), text_anchor="end") for at, x in labels]
    return overhang, 0.87 * width + 18, turned


def ticks(low: Number, high: Number, n: int = 4) -> dict[Number, str]:
    """Return round numbers between two, and labels of four digits, or more if they were equal."""
    rough = (high - low) / n or 1.0
    unit = 10 ** math.floor(math.log10(rough))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    found = [k * step for k in range(first, last + 1)]
    if len(found) < 2 and low != high:
        return ticks(low, high, 2 * n)
    labels = [f"{x:.4g}" for x in found]
    labels = labels if len(set(labels)) == len(found) else [f"{x:.9g}" for x in found]
    return {x: label.replace("-", "−") for x, label in zip(found, labels, strict=True)}


def header(title: str, unit: str, names: Names, width: Number) -> tuple[list[Markup], Number]:
    """Return title, unit and legend in as many lines as they need, and the height they take."""
    lines = textwrap.wrap(title, max(20, int((width - 16) / 7.4))) or [""]
    lines = [(line, "title") for line in lines] + [(unit, "soft")] * bool(unit)
    parts = [text(8.0, 16.0 + 14 * i, *line) for i, line in enumerate(lines)]
    x, y = 8.0, 16.0 + 14 * len(lines)
    for i, (name, color) in enumerate(zip(names, series_colors(names), strict=True)):
        if x > 8 and x + 24 + text_width(name) > width:
            x, y = 8.0, y + 14
        parts += [marker(i, x + 5, y - 4, color, 4), text(x + 14, y, name)]
        x += 30 + text_width(name)
    return parts, y - 4 + 14 * bool(names)
