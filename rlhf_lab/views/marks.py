"""Colors and elements of SVG drawings; each mark has its stored number in its title."""

import math
import textwrap
from collections.abc import Sequence
from html import escape
from typing import Literal
from unicodedata import east_asian_width

from rich.color import ColorTriplet

from rlhf_lab.console import visible
from rlhf_lab.views.templates import read_web

Kind = Literal["diverging", "sequential"]
Number = float | int
Optionals = Sequence[Number | None]
Names = Sequence[str]
ORANGE, NEUTRAL = ColorTriplet(213, 94, 0), ColorTriplet(242, 242, 242)
BLUE, DEEP = ColorTriplet(0, 114, 178), ColorTriplet(0, 78, 124)
N_COLORS = 8  # classes f0 to f7 (fill) and s0 to s7 (stroke) in picture.css
COLOR_OF_NAME = {  # one color per quantity on the whole page
    **{"exact": 0, "k1": 1, "k2": 2, "k3": 3, "mean reward": 0, "reward": 0, "true reward": 4},
    **{"policy": 1, "reference": 5, "value": 2, "own weights": 0, "unembedding": 3},
}
DASHES = ("", "6 3", "2 2", "8 2 2 2")
SVG_STYLE = read_web("picture.css").replace("\n", "")
LONGEST_LABEL = 44  # letters; a longer one is cut in its middle, and is whole in the title


def blend(low: ColorTriplet, high: ColorTriplet, fraction: float) -> ColorTriplet:
    return ColorTriplet(*(round(a + (b - a) * fraction) for a, b in zip(low, high, strict=True)))


def pick_color(value: Number, limit: Number, kind: Kind = "diverging") -> ColorTriplet:
    """Return the color of a number; beyond the limit it stays that of the limit, nan is 0.

    Diverging: orange at -limit, nearly white at 0, blue at limit (Okabe and Ito 2008).
    Sequential: nearly white at 0, deep blue at limit.
    """
    size = 0.0 if limit <= 0 or math.isnan(value) else max(-1.0, min(1.0, value / limit))
    if kind == "sequential":
        return blend(NEUTRAL, DEEP, max(0.0, size))
    return blend(NEUTRAL, BLUE if size > 0 else ORANGE, abs(size))


def ink_on(background: ColorTriplet) -> ColorTriplet:
    """Return black or white, whose contrasts are equal at a luminance of 0.179 (WCAG 2.2)."""
    parts = background.normalized
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return ColorTriplet(0, 0, 0) if luminance > 0.179 else ColorTriplet(255, 255, 255)


def document(width: Number, height: Number, body: str, title: str, on_page: bool = False) -> str:
    """Return an SVG document, or an element of a page that has `SVG_STYLE`."""
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    space = "" if on_page else ' xmlns="http://www.w3.org/2000/svg"'
    style = "" if on_page else f"<style>{SVG_STYLE}</style>"
    return (
        f'<svg{space} class="lab" {size} role="img" aria-label="{_escaped(title)}">{style}'
        f'<rect class="paper" width="100%" height="100%"/>{body}</svg>'
    )


def _escaped(text: str) -> str:
    return escape(visible(text.replace("\n", "↵")))


def text_width(text: str) -> float:
    """Return an upper estimate of the width of a text at 11 pixels, in any of the fonts."""
    wide = lambda x: x in "mwMW@%—" or east_asian_width(x) in "WF"
    thin = lambda x: x in "iljtfrI.,:;'|!()[] "
    return sum(11.2 if wide(x) else 4.6 if thin(x) else 7.1 + 1.1 * x.isupper() for x in text)


def element(tag: str, kind: str, **attributes: Number | str) -> str:
    """Return an SVG element of a class; numbers have one decimal."""
    pairs = {k: f"{v:.1f}" if isinstance(v, float) else v for k, v in attributes.items()}
    listed = " ".join(f'{k}="{v}"' for k, v in pairs.items())
    return f'<{tag} class="{kind}" {listed}/>'


def text(x: Number, y: Number, words: str, kind: str = "", anchor: str = "", turn: int = 0) -> str:
    """Return a text; `anchor` is empty, middle or end."""
    place = f'x="{x:.1f}" y="{y:.1f}"'
    place = f'transform="translate({x:.1f} {y:.1f})rotate({turn})"' if turn else place
    place += f' class="{kind}"' * bool(kind) + f' text-anchor="{anchor}"' * bool(anchor)
    return f"<text {place}>{_escaped(words)}</text>"


def moved(body: str, x: Number, y: Number) -> str:
    return f'<g transform="translate({x:.1f} {y:.1f})">{body}</g>'


def labels_below(
    labels: Names, left: Number, wide: Number, y: Number, is_turned: bool
) -> tuple[float, str]:
    """Return the height of labels below columns of a width, and the labels."""
    parts = []
    for i, label in enumerate(labels):
        x = left + (i + 0.5) * wide
        turned = (x + 4, y + 8, label, "", "end", -60)
        parts.append(text(*turned) if is_turned else text(x, y + 13, label, "", "middle"))
    return 0.87 * widest(labels) + 18 if is_turned else 22.0, "".join(parts)


def shortened(label: str) -> str:
    half = LONGEST_LABEL // 2
    return label if len(label) <= LONGEST_LABEL else f"{label[:half]}…{label[-half:]}"


def mark_with_title(mark: str, title: str) -> str:
    return f"<g><title>{_escaped(title)}</title>{mark}</g>"


def is_number(x: Number | None) -> bool:
    """Return True unless x is missing, infinite or not a number."""
    return x is not None and x - x == 0


def titled(
    mark: str, label: str, value: Number, low: Number | None, high: Number | None, more: str = ""
) -> str:
    """Return a mark whose tooltip is its label, the stored number and the interval."""
    ends = f" [{low:.9g}, {high:.9g}]" if is_number(low) and is_number(high) else ""
    return mark_with_title(mark, f"{label}: {value:.9g}{ends}{more}")


def series_colors(names: Names) -> list[int]:
    known = [COLOR_OF_NAME.get(name.partition(",")[0]) for name in names]
    known = [color if color not in known[:i] else None for i, color in enumerate(known)]
    free = [i for i in range(N_COLORS) if i not in known] or [0]
    others = iter(free * (len(names) // len(free) + 1))
    return [next(others) if color is None else color for color in known]


def ticks(low: Number, high: Number, n: int = 4) -> list[Number]:
    rough = (high - low) / n or 1.0
    unit = 10 ** math.floor(math.log10(rough))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    found = [k * step for k in range(first, last + 1)]
    return found if len(found) > 1 or low == high else ticks(low, high, 2 * n)


def tick_labels(marks: Sequence[Number]) -> list[str]:
    """Return labels of four digits, or of more if they would be equal."""
    labels = [f"{x:.4g}".replace("-", "−") for x in marks]
    return labels if len(set(labels)) == len(marks) else [f"{x:.9g}" for x in marks]


def header(title: str, unit: str, names: Names, width: Number) -> tuple[str, Number]:
    """Return title, unit and legend in as many lines as they need, and the height they take."""
    lines = textwrap.wrap(title, max(20, int((width - 16) / 7.4))) or [""]
    parts = [text(8, 16.0 + 14 * i, line, "title") for i, line in enumerate(lines)]
    y, x = 16.0 + 14 * len(lines), 8.0
    if unit:
        parts.append(text(8, y, unit, "soft"))
        y += 14
    for i, (name, color) in enumerate(zip(names, series_colors(names), strict=True)):
        if x > 8 and x + 24 + text_width(name) > width:
            x, y = 8.0, y + 14
        parts.append(marker(i, x + 5, y - 4, color, 4) + text(x + 14, y, name))
        x += 30 + text_width(name)
    return "".join(parts), y - 4 + 14 * bool(names)


def widest(names: Names) -> float:
    return max(map(text_width, names), default=0.0)


def marker(i: int, x: Number, y: Number, color: int, r: Number) -> str:
    """A circle, square, triangle or diamond, by the number of the series."""
    if i % 4 == 0:
        return f'<circle class="f{color}" cx="{x:.1f}" cy="{y:.1f}" r="{r:g}"/>'
    shape = {
        1: f"M-{r:g}-{r:g}h{2 * r:g}v{2 * r:g}h-{2 * r:g}z",
        2: f"M0-{1.2 * r:g}L{1.2 * r:g} {r:g}H-{1.2 * r:g}z",
        3: f"M0-{1.3 * r:g}L{1.3 * r:g} 0L0 {1.3 * r:g}L-{1.3 * r:g} 0z",
    }[i % 4]
    return f'<path class="f{color}" d="{shape}" transform="translate({x:.1f} {y:.1f})"/>'
