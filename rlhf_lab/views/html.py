"""HTML fragments that a notebook shows, and tables."""

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
        fragment: what goes into a page's body; it needs nothing from outside.
    """

    fragment: str

    def _repr_html_(self) -> str:
        return visible(self.fragment)


def table(
    columns: list[str] | None, rows: list[list[object]], words: tuple[int, ...] = (0,)
) -> str:
    """A table; numbers are set to the right with four significant digits.

    Args:
        columns: what stands in the header; there is none when None.
        words: the columns that hold words, which are set to the left.
    """

    def cell(tag: str, column: int, value: object) -> str:
        kind = ' class="words"' if column in words else ""
        return f"<{tag}{kind}>{escape(formatted(value))}</{tag}>"

    def line(tag: str, values: list[object]) -> str:
        return "<tr>" + "".join(cell(tag, i, value) for i, value in enumerate(values)) + "</tr>"

    body = "\n".join(line("td", row) for row in rows)
    head = "" if columns is None else f"<thead>{line('th', list(columns))}</thead>"
    return (
        f'{TABLE_STYLE}<div class="scroll"><table class="lab">{head}'
        f"<tbody>{body}</tbody></table></div>"
    )


def plain(fragment: str) -> str:
    """Return a fragment without its style elements, for a page that has their rules."""
    return fragment.replace(TABLE_STYLE, "").replace(STYLE_ELEMENT, "")


def failed_check(name: str) -> str:
    """Return a paragraph about a check that failed."""
    return f'<p class="failed">Failed check: {escape(name)}</p>'


def formatted(value: object) -> str:
    """A value as a table shows it: a dash for None, four digits for a number."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
