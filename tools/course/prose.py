"""Numbers in a lesson's prose, held against what its cells print and hold."""

import re
from html import unescape

from nbformat import NotebookNode

NUMBER = re.compile(r"(?<![\w.$/\\])-?\d+(?:,\d{3})*(?:\.\d+)?(?![\w/])")
NOT_PROSE = re.compile(
    r"```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$\n]*\$|\]\([^)]*\)|<[^>]+>|https?://\S+|"
    r"\[\d{4}\.\d{5}\]|\b(?:et al\.|equation|section|figure|table|lessons?|run)\s+\d+[\d, .and-]*|"
    r"\(\d+ s on one core\)|about \d+ minutes|About \d+ minutes[^.]*\.|All cells together[^.]*\.|"
    r"^\s*\d+\. ",
    re.DOTALL | re.MULTILINE,
)
COLOR = re.compile(r"\x1b\[[0-9;]*m")
TAG, TOOLTIP = re.compile(r"<[^>]*>"), re.compile(r'title="([^"]*)"')
YEARS = range(1900, 2100)
SMALL = 12
"""Whole numbers up to here are words of counting: two terms, four tokens."""


def unsupported_numbers(notebook: NotebookNode) -> list[str]:
    """The numbers of an executed lesson's text that no cell prints or has in its source.

    1. Take the prose without code, formulas, links and stated times.
    2. Leave out years, and whole numbers up to `SMALL`.
    3. A number is there when a printed one rounds to it; a percentage also as a share.
    """
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = "\n".join([*map(_printed, code), *(cell.source for cell in code)])
    there = {abs(_value(found)) for found in NUMBER.findall(shown)}
    missing = []
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            continue
        prose = NOT_PROSE.sub(" ", cell.source)
        for found in NUMBER.finditer(prose):
            is_share = prose[found.end() :].lstrip().startswith("%")
            if not _is_there(found[0], there, is_share):
                missing.append(found[0])
    return missing


def _printed(cell: NotebookNode) -> str:
    """What a cell's outputs say, tooltips of coloured tokens included."""
    texts = []
    for output in cell.get("outputs", []):
        texts.append(output.get("text", ""))
        for kind, content in output.get("data", {}).items():
            if kind == "text/plain":
                texts.append(content)
            elif kind == "text/html" and "base64" not in content:
                texts += [*TOOLTIP.findall(content), unescape(TAG.sub(" ", content))]
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
