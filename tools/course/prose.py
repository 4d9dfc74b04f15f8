"""Numbers in a lesson's prose, held against what its cells print and hold."""

import re
from collections.abc import Set
from html import unescape

from nbformat import NotebookNode

NUMBER = re.compile(r"(?<![\w.$/\\])-?\d+(?:,\d{3})*(?:\.\d+)?(?![\w/])")
NOT_PROSE = re.compile(
    r"```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$\n]*\$|\]\([^)]*\)|<[^>]+>|https?://\S+|"
    r"\[\d{4}\.\d{5}\]|\b(?:et al\.|equation|section|figure|table|lessons?|run)\s+\d+[\d, .and-]*|"
    r"\(\d+ s on one core\)|about \d+ minutes|About \d+ minutes[^.]*\.|All cells together[^.]*\.|"
    r"^\s*\d+\. |^(?:#|-) \d\d ",
    re.DOTALL | re.MULTILINE,
)
COLOR = re.compile(r"\x1b\[[0-9;]*m")
DRAWN = re.compile(r"<(svg|style)\b.*?</\1>", re.DOTALL)
FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)
TAG, TOOLTIP = re.compile(r"<[^>]*>"), re.compile(r'title="([^"]*)"')
YEARS = range(1900, 2100)
SMALL = 12
"""Whole numbers up to here are words of counting: two terms, four tokens."""
BEFORE, BEHIND = 6, 4
"""How many cells in front of a text, and behind it, its results may come from."""


def unsupported_numbers(notebook: NotebookNode, tried: Set[float] = frozenset()) -> list[str]:
    """The numbers of an executed lesson's text that no cell prints or has in its source.

    1. Take the prose without code, formulas, links and stated times.
    2. Leave out years, and whole numbers up to `SMALL`.
    3. A number is there when a printed one rounds to it; a percentage also as a share.
    4. A whole number (a size) may stand in any cell, or in its source. A decimal or a percentage
       (a result) must be printed at most `BEFORE` cells in front of the text or `BEHIND` cells
       after it: in a whole lesson some printed number rounds to nearly any short decimal.

    Args:
        tried: stored figures of what a lesson suggests to try, for the text in `<details>` alone.
    """
    printed = [_numbers(_printed(c)) if c.cell_type == "code" else set() for c in notebook.cells]
    written = set().union(*(_numbers(c.source) for c in notebook.cells if c.cell_type == "code"))
    anywhere = written.union(*printed)
    missing = []
    for i, cell in enumerate(notebook.cells):
        if cell.cell_type != "markdown":
            continue
        near = written.union(*printed[max(0, i - BEFORE) : i + BEHIND + 1])
        parts = [(FOLDED.sub(" ", cell.source), frozenset())]
        parts += [(folded, tried) for folded in FOLDED.findall(cell.source)]
        for text, more in parts:
            prose = NOT_PROSE.sub(" ", text)
            for found in NUMBER.finditer(prose):
                is_share = prose[found.end() :].lstrip().startswith("%")
                is_result = is_share or "." in found[0]
                there = (near if is_result else anywhere) | more
                if not _is_there(found[0], there, is_share):
                    missing.append(found[0])
    return missing


def _numbers(text: str) -> set[float]:
    """The numbers of a text, without their signs."""
    return {abs(_value(found)) for found in NUMBER.findall(text)}


def _printed(cell: NotebookNode) -> str:
    """What a cell's outputs say in words and numbers, tooltips of coloured tokens included.

    Not what a picture is drawn with: the coordinates, ticks and style of an SVG are no printed
    numbers, nor is the `repr` that Jupyter keeps beside HTML.
    """
    texts = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        html = DRAWN.sub(" ", data.get("text/html", ""))
        texts.append(output.get("text", ""))
        if "text/html" not in data:
            texts.append(DRAWN.sub(" ", data.get("text/plain", "")))
        texts += [*TOOLTIP.findall(html), unescape(TAG.sub(" ", html))]
    return COLOR.sub("", "\n".join(texts))


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def _is_there(text: str, there: set[float], is_share: bool) -> bool:
    value, digits = abs(_value(text)), len(text.partition(".")[2])
    if not digits and (value <= SMALL and not is_share or value in YEARS):
        return True
    half = 0.5 * 10**-digits + 1e-9
    if any(abs(value - other) <= half for other in there):
        return True
    return is_share and any(abs(value - 100 * other) <= half for other in there if other <= 1)
