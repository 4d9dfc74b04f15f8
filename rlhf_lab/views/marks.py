"""SVG drawings of bars, curves and matrices, with the stored number in the title of each mark."""

import math
import textwrap
from collections.abc import Sequence
from html import escape
from unicodedata import east_asian_width

from rlhf_lab.console import visible
from rlhf_lab.views.color import Number

LIGHT = "#1c6fb0 #c44e00 #2a8a57 #8d4fa8 #a67500 #5b6470 #a3325c #0f7f81".split()
DARK = "#6db3ee #ff9a57 #5cc48d #c792e0 #e0b341 #aab2bd #f08ab0 #4cc3c5".split()
COLOR_OF_NAME = {  # one color per quantity on the whole page
    **{"exact": 0, "k1": 1, "k2": 2, "k3": 3, "mean reward": 0, "reward": 0, "true reward": 4},
    **{"policy": 1, "reference": 5, "value": 2, "own weights": 0, "unembedding": 3},
}
DASHES = ("", "6 3", "2 2", "8 2 2 2")
SVG_STYLE = (
    'svg.lab{font:11px system-ui,"Segoe UI","DejaVu Sans",sans-serif;--ink:#1c1e21;--paper:#fff;'
    "--line:#d9d9d4;--soft:#565b63;--deep:#004e7c;--more:#0072b2;--less:#d55e00}"
    f"svg.lab{{{';'.join(f'--c{i}:{c}' for i, c in enumerate(LIGHT))}}}"
    "@media(prefers-color-scheme:dark){svg.lab{--ink:#ececec;--paper:#16181b;--line:#44484e;"
    "--soft:#aab0b8;--deep:#a5d8ff;--more:#58b0ea;--less:#ff8c42;"
    f"{';'.join(f'--c{i}:{c}' for i, c in enumerate(DARK))}}}}}"
    ".lab text{fill:var(--ink)}.lab .soft{fill:var(--soft)}.lab .title{font-weight:600}"
    ".lab .paper{fill:var(--paper)}.lab .axis{stroke:var(--line)}.lab polyline{fill:none}"
    ".lab .end{stroke:var(--ink);stroke-width:1.2}.lab .band{opacity:.17}"
    ".lab .far{stroke:var(--ink);stroke-dasharray:2 2}"
    ".lab .deep{fill:var(--deep)}.lab .more{fill:var(--more)}.lab .less{fill:var(--less)}"
    + "".join(
        f".lab .f{i}{{fill:var(--c{i})}}.lab .s{i}{{stroke:var(--c{i});stroke-width:1.6}}"
        for i in range(len(LIGHT))
    )
)
STYLE_ELEMENT = f"<style>{SVG_STYLE}</style>"
LONGEST_LABEL = 44  # letters; a longer one is cut in its middle, and is whole in the title


def document(width: Number, height: Number, body: str, title: str) -> str:
    """Return a whole SVG document."""
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="lab" {size} role="img" '
        f'aria-label="{_escaped(title)}">{STYLE_ELEMENT}'
        f'<rect class="paper" width="100%" height="100%"/>{body}</svg>'
    )


def _escaped(text: str) -> str:
    return escape(visible(text.replace("\n", "↵")))


def text_width(text: str) -> float:
    """Upper estimate of the width of a text at 11 pixels, in any of the fonts."""

    def width(letter: str) -> float:
        if east_asian_width(letter) in "WF" or letter in "mwMW@%—":
            return 11.2
        return 4.6 if letter in "iljtfrI.,:;'|!()[] " else 8.2 if letter.isupper() else 7.1

    return sum(map(width, text))


def element(tag: str, kind: str, **attributes: Number | str) -> str:
    """Return an SVG element of a class; numbers have one decimal."""
    pairs = {k: f"{v:.1f}" if isinstance(v, float) else v for k, v in attributes.items()}
    listed = " ".join(f'{k}="{v}"' for k, v in pairs.items())
    return f'<{tag} class="{kind}" {listed}/>'


def text(x: Number, y: Number, words: str, kind: str = "", anchor: str = "", turn: int = 0) -> str:
    """Return a text; `anchor` is empty, middle or end."""
    place = f'x="{x:.1f}" y="{y:.1f}"'
    place = f'transform="translate({x:.1f} {y:.1f})rotate({turn})"' if turn else place
    kind, anchor = (
        f' {k}="{v}"' if v else "" for k, v in (("class", kind), ("text-anchor", anchor))
    )
    return f"<text {place}{kind}{anchor}>{_escaped(words)}</text>"


def moved(body: str, x: Number, y: Number) -> str:
    """Return marks at another place."""
    return f'<g transform="translate({x:.1f} {y:.1f})">{body}</g>'


def labels_below(
    labels: Sequence[str], left: Number, wide: Number, y: Number, is_turned: bool
) -> tuple[float, str]:
    """Return the height of labels below columns of a width, and the labels."""
    parts = []
    for i, label in enumerate(labels):
        x = left + (i + 0.5) * wide
        turned = (x + 4, y + 8, label, "", "end", -60)
        parts.append(text(*turned) if is_turned else text(x, y + 13, label, "", "middle"))
    return 0.87 * widest(labels) + 18 if is_turned else 22.0, "".join(parts)


def shortened(label: str) -> str:
    """Return a label without its middle if it is long."""
    half = LONGEST_LABEL // 2
    return label if len(label) <= LONGEST_LABEL else f"{label[:half]}…{label[-half:]}"


def mark_with_title(mark: str, title: str) -> str:
    """Return a mark with its tooltip."""
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


def series_colors(names: Sequence[str]) -> list[int]:
    """Return the number of the color of each series; known quantities keep theirs."""
    known = [COLOR_OF_NAME.get(name.partition(",")[0]) for name in names]
    known = [color if color not in known[:i] else None for i, color in enumerate(known)]
    free = [i for i in range(len(LIGHT)) if i not in known] or [0]
    others = iter(free * (len(names) // len(free) + 1))
    return [next(others) if color is None else color for color in known]


def ticks(low: Number, high: Number, n: int = 4) -> list[Number]:
    """Return round numbers between two ends, about `n` of them."""
    rough = (high - low) / n or 1.0
    unit = 10 ** math.floor(math.log10(rough))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    found = [k * step for k in range(first, last + 1)]
    return found if len(found) > 1 or low == high else ticks(low, high, 2 * n)


def round_number(x: Number) -> str:
    """Return a number with at most four digits."""
    return f"{x:.4g}".replace("-", "−")


def tick_labels(marks: Sequence[Number]) -> list[str]:
    """Return ticks as labels that differ, with more than four digits if they need them."""
    labels = list(map(round_number, marks))
    return labels if len(set(labels)) == len(marks) else [f"{x:.9g}" for x in marks]


def header(title: str, unit: str, names: Sequence[str], width: Number) -> tuple[str, Number]:
    """Title, unit and legend in as many lines as they need, and the height they take."""
    parts, y, x = [], 16.0, 8.0
    for line in textwrap.wrap(title, max(20, int((width - 16) / 7.4))) or [""]:
        parts.append(text(8, y, line, "title"))
        y += 14
    if unit:
        parts.append(text(8, y, unit, "soft"))
        y += 14
    if len(names) > 1:
        for i, (name, color) in enumerate(zip(names, series_colors(names), strict=True)):
            if x > 8 and x + 24 + text_width(name) > width:
                x, y = 8.0, y + 14
            parts.append(marker(i, x + 5, y - 4, color, 4) + text(x + 14, y, name))
            x += 30 + text_width(name)
        y += 14
    return "".join(parts), y - 4


def widest(names: Sequence[str]) -> float:
    """Return the width of the widest text."""
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
