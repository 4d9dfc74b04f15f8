"""HTML fragments, tables and SVG drawings, for notebooks and for the page about a run."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from rlhf_lab.console import visible
from rlhf_lab.views.marks import SVG_STYLE, Number, Size, tag
from rlhf_lab.views.templates import read_web, render

STYLE_ELEMENT = Markup(f"<style>{SVG_STYLE}</style>")
WIDE_PIXELS = 520  # pixels from which a drawing takes a whole row, and is not made smaller


class Drawn:
    """A picture, a table or a text with its HTML, content of a page's body."""

    fragment: str

    def _repr_html_(self) -> str:
        return visible(self.fragment)

    def __html__(self) -> str:
        return self.fragment


@dataclass(frozen=True)
class Html(Drawn):
    """A fragment of HTML, without references to other files."""

    fragment: str


@dataclass(frozen=True)
class Table(Drawn):
    """Rows of numbers and words below a header; words are aligned left."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""
    note: str = ""

    @property
    def fragment(self) -> str:
        """The table as HTML, between its title and its note."""
        columns = enumerate(zip(*self.rows, strict=True))
        words = {i for i, cells in columns if any(map(_is_word, cells))}
        return render("table.html", table=self, words=words)

    def _repr_html_(self) -> str:
        return f"<style scoped>{read_web('table.css')}</style>{super()._repr_html_()}"


@dataclass(frozen=True)
class Picture(Drawn):
    """A drawing as SVG, legible on light and dark pages.

    Args:
        size: width and height in pixels.
        parts: its elements.
        alt: the description for readers who do not see it.
        note: the caption on a page.
        values: the numbers; if all are 0 or missing, a page has a sentence instead.
    """

    size: Size
    parts: Sequence[Markup]
    alt: str
    title: str = ""
    unit: str = ""
    note: str = ""
    values: Sequence[Number | None] = (1,)

    @property
    def svg(self) -> str:
        """The whole document."""
        width, height = (f"{x:.0f}" for x in self.size)
        place = {"width": width, "height": height, "viewBox": f"0 0 {width} {height}"}
        names = {"class": "lab", "role": "img", "aria-label": self.alt.replace("\n", "↵")}
        paper = tag("rect", class_="paper", width="100%", height="100%")
        marks = STYLE_ELEMENT, paper, *self.parts
        return visible(tag("svg", *marks, xmlns="http://www.w3.org/2000/svg", **names, **place))

    def _repr_mimebundle_(self, **selection: object) -> dict[str, str]:
        return {"image/svg+xml": self.svg, "text/html": self._repr_html_(), "text/plain": self.alt}

    def _repr_html_(self) -> str:
        data = base64.b64encode(self.svg.encode()).decode()
        return f'<img alt="{escape(self.alt)}" src="data:image/svg+xml;base64,{data}">'

    @property
    def fragment(self) -> str:
        """The drawing as part of a page that has `marks.SVG_STYLE`, with its tooltips."""
        known = [x for x in self.values if x is not None]
        if not any(known):
            return f"<p>{escape(self.title)}: {'0 everywhere' if known else 'not defined'}.</p>"
        wide = ' class="wide"' * (round(self.size[0]) > WIDE_PIXELS)
        caption = f"<figcaption>{escape(self.note)}</figcaption>" * bool(self.note)
        return f"<figure{wide}>{self.svg.replace(STYLE_ELEMENT, '')}{caption}</figure>"


def _is_word(x: object) -> bool:
    return isinstance(x, str) and not x[:1].isdigit() and x[:1] not in "-–−"


def paragraph(text: str, kind: str = "") -> Html:
    attribute = f' class="{kind}"' * bool(kind)
    return Html(f"<p{attribute}>{escape(text)}</p>")
