"""A drawing as SVG that notebooks show and a file keeps."""

import base64
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rlhf_lab.files import write_marked
from rlhf_lab.views.marks import STYLE_ELEMENT


@dataclass(frozen=True)
class Picture:
    """A drawing as SVG, legible on light and dark pages.

    Args:
        svg: the whole document.
        alt: the description for readers who do not see it.
    """

    svg: str
    alt: str

    @property
    def width(self) -> int:
        """The width in pixels."""
        return int(self.svg.partition(' width="')[2].partition('"')[0])

    def _repr_mimebundle_(self, **selection: object) -> dict[str, str]:
        return {"image/svg+xml": self.svg, "text/html": self.html(), "text/plain": self.alt}

    def _repr_html_(self) -> str:
        return self.html()

    def html(self) -> str:
        """Return an image element that contains the drawing."""
        data = base64.b64encode(self.svg.encode()).decode()
        return f'<img alt="{escape(self.alt)}" src="data:image/svg+xml;base64,{data}">'

    def inline(self) -> str:
        """Return the drawing as part of a page that has `marks.SVG_STYLE`, with its tooltips."""
        return self.svg.replace(STYLE_ELEMENT, "").replace(
            ' xmlns="http://www.w3.org/2000/svg"', ""
        )

    def save(self, path: str | Path) -> Path:
        """Write the SVG file.

        Raises:
            RunError: If the file exists and rlhf_lab did not write it.
        """
        path = Path(path)
        write_marked(path, self.svg)
        return path
