"""A drawing as SVG, which a notebook shows and a file keeps."""

import base64
import io
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_lab.files import write_marked

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image


@dataclass(frozen=True)
class Picture:
    """A drawing as SVG.

    Args:
        svg: the whole document.
        alt: what it shows, in words.
    """

    svg: str
    alt: str
    _figure: "Figure | None" = field(default=None, repr=False, compare=False)

    def image(self, dots_per_inch: int = 120) -> "Image":
        """The drawing in pixels, as loggers take it.

        Raises ValueError for a picture that was not drawn here.
        """
        from PIL import Image

        if self._figure is None:
            raise ValueError("this picture is SVG alone; draw it with curves, bars or heatmap.")
        buffer = io.BytesIO()
        self._figure.savefig(buffer, format="png", dpi=dots_per_inch)
        return Image.open(buffer)

    def _repr_html_(self) -> str:
        return self.html()

    def html(self) -> str:
        """An image element that holds the drawing itself."""
        data = base64.b64encode(self.svg.encode()).decode()
        return f'<img alt="{escape(self.alt)}" src="data:image/svg+xml;base64,{data}">'

    def save(self, path: str | Path) -> Path:
        """Write the SVG file; raises RunError where something that is no picture of ours is."""
        path = Path(path)
        write_marked(path, self.svg)
        return path
