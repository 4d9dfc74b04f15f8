"""HTML fragments that a notebook shows, and tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rlhf_lab.console import visible
from rlhf_lab.views.marks import STYLE_ELEMENT

TABLE_STYLE = """<style scoped>
table.lab { border-collapse: collapse; font-size: 13px; margin: .6rem 0; }
table.lab th, table.lab td { border: 1px solid #8888; padding: 2px 8px; text-align: right;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
table.lab th.words, table.lab td.words { text-align: left; }
</style>"""


@dataclass(frozen=True)
class Html:
    """A fragment of HTML.

    Args:
        fragment: content of a page's body, without references to other files.
    """

    fragment: str

    def _repr_html_(self) -> str:
        return visible(self.fragment)


def table(columns: Sequence[str] | None, rows: Sequence[Sequence[object]]) -> str:
    """Return a table without a header if `columns` is None; words are aligned left."""
    words = {i for i, cells in enumerate(zip(*rows, strict=True)) if any(map(_is_word, cells))}

    def line(tag: str, values: Sequence[object]) -> str:
        kinds = (' class="words"' * (i in words) for i in range(len(values)))
        pairs = zip(kinds, values, strict=True)
        cells = (f"<{tag}{kind}>{escape(formatted(value))}</{tag}>" for kind, value in pairs)
        return f"<tr>{''.join(cells)}</tr>"

    body = "\n".join(line("td", row) for row in rows)
    head = "" if columns is None else f"<thead>{line('th', columns)}</thead>"
    return (
        f'{TABLE_STYLE}<div class="scroll"><table class="lab">{head}'
        f"<tbody>{body}</tbody></table></div>"
    )


def _is_word(x: object) -> bool:
    return isinstance(x, str) and not x[:1].isdigit() and x[:1] not in "-–−"


def plain(fragment: str) -> str:
    """Return a fragment for the page, which has the rules and whose script sets the styles."""
    fragment = visible(fragment).replace(TABLE_STYLE, "").replace(STYLE_ELEMENT, "")
    return fragment.replace(' style="', ' data-style="')


def failed_check(name: str) -> str:
    """Return a paragraph about a check that failed."""
    return f'<p class="failed">Failed check: {escape(name)}</p>'


def formatted(value: object) -> str:
    """Return a value as text: a dash for None, a number with four digits."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
