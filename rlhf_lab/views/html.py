"""HTML fragments that show themselves in a notebook and stand alone as a page."""

from dataclasses import dataclass
from html import escape
from pathlib import Path

from rlhf_lab.console import visible
from rlhf_lab.files import write_marked
from rlhf_lab.views.marks import STYLE_ELEMENT, SVG_STYLE

STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #ffffff; --line: #b8b8b8;
  --faint: #5f5f5f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ececec; --paper: #16181b; --line: #565656; --faint: #a8a8a8; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.25; } h2 { margin-top: 2.4rem; border-bottom: 1px solid var(--line); }
figure { margin: 1rem 0; min-width: 0; overflow-x: auto; }
figure svg { max-width: 100%; height: auto; } figure.wide { grid-column: 1 / -1; }
figure.wide svg { max-width: none; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr));
  gap: 0 1rem; } figcaption { color: var(--faint); }
img { max-width: 100%; }
code { font-family: ui-monospace, monospace; }
.scroll { overflow-x: auto; }
"""
POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'"
)
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

    def save(self, path: str | Path, title: str = "rlhf_lab") -> Path:
        """Write the fragment as a page of its own.

        Raises RunError where something that is no page of ours is.
        """
        path = Path(path)
        write_marked(path, page(title, self.fragment))
        return path


def page(title: str, body: str) -> str:
    """A whole document around a body, legible on light and dark.

    It loads nothing and runs nothing, which a content security policy holds a browser to.
    """
    head = (
        f'<meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width">'
        f"<title>{escape(visible(title))}</title><style>{STYLE}{SVG_STYLE}</style>"
    )
    body = visible(body)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


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
