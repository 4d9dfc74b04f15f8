"""Numbers in the text of a lesson, compared with the numbers that its cells print or contain."""

import re
from html import unescape

from nbformat import NotebookNode

NUMBER = re.compile(r"(?<![\w.$/\\])-?\d+(?:,\d{3})*(?:\.\d+)?(?![\w/])")
NOT_PROSE = re.compile(
    r"```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$\n]*\$|\]\([^)]*\)|<[^>]+>|https?://\S+|"
    r"\[\d{4}\.\d{5}\]|\b(?:et al\.|equation|section|figure|table|lessons?|run)\s+\d+[\d, .and-]*|"
    r"\(\d+ s on one core\)|about \d+ minutes|About \d+ minutes[^.]*\.|(All c|The whole n)[^.]*\.|"
    r"^\s*\d+\. |^(?:#|-) \d\d |\[[Ll]esson \d\d",
    re.DOTALL | re.MULTILINE,
)
PLACEHOLDER = re.compile(r"\b[A-Z]+_[A-Z]\w*\b(?!\[)")  # of a number that was never filled in
COLOR = re.compile(r"\x1b\[[0-9;]*m")
DRAWN = re.compile(r"<(svg|style)\b.*?</\1>", re.DOTALL)
FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)
TAG, TOOLTIP = re.compile(r"<[^>]*>"), re.compile(r'title="([^"]*)"')
YEARS = range(1900, 2100)
SMALL = 12  # integers up to here count words: two terms, four tokens
BEFORE, AFTER = 6, 4  # cells before and after a text that its results may come from


def unsupported_numbers(notebook: NotebookNode) -> list[str]:
    """List numbers in the text of an executed lesson that its cells do not print, and placeholders.

    A printed number must round to it; a percentage may be printed as a fraction. An integer (a
    size) may be in any cell, also in the source. A decimal or percentage (a result) must be
    printed in a cell nearby: in a whole lesson some number rounds to nearly any short decimal.
    Text in `<details>` reports runs of the reader's suggestions, and is not compared.
    """
    printed = [_numbers(_printed(c)) if c.cell_type == "code" else set() for c in notebook.cells]
    written = set().union(*(_numbers(c.source) for c in notebook.cells if c.cell_type == "code"))
    anywhere = written.union(*printed)
    missing = []
    for i, cell in enumerate(notebook.cells):
        if cell.cell_type != "markdown":
            continue
        near = written.union(*printed[max(0, i - BEFORE) : i + AFTER + 1])
        prose = NOT_PROSE.sub(" ", FOLDED.sub(" ", cell.source))
        missing += PLACEHOLDER.findall(prose)
        for found in NUMBER.finditer(prose):
            is_percentage = prose[found.end() :].lstrip().startswith("%")
            known = near if is_percentage or "." in found[0] else anywhere
            if not _is_supported(found[0], known, is_percentage):
                missing.append(found[0])
    return missing


def _numbers(text: str) -> set[float]:
    return {abs(float(found.replace(",", ""))) for found in NUMBER.findall(text)}


def _printed(cell: NotebookNode) -> str:
    """Return the printed text of a cell, with tooltips but without coordinates of pictures."""
    texts = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        html = DRAWN.sub(" ", data.get("text/html", ""))
        texts.append(output.get("text", ""))
        if "text/html" not in data or "image/svg+xml" in data:
            texts.append(DRAWN.sub(" ", data.get("text/plain", "")))
        texts += [*TOOLTIP.findall(html), unescape(TAG.sub(" ", html))]
    return COLOR.sub("", "\n".join(texts))


def _is_supported(text: str, known: set[float], is_percentage: bool) -> bool:
    value, digits = abs(float(text.replace(",", ""))), len(text.partition(".")[2])
    if not digits and (value <= SMALL and not is_percentage or value in YEARS):
        return True
    half = 0.5 * 10**-digits + 1e-9
    fractions = {100 * other for other in known if other <= 1} if is_percentage else set()
    return any(abs(value - other) <= half for other in known | fractions)
