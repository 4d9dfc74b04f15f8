"""Picture kinds as plain data: bars, curves, strips of tokens, matrices, tables; and drawings."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from types import MappingProxyType

from rlhf_lab.views.color import Kind, Number
from rlhf_lab.views.marks import STYLE_ELEMENT

Optionals = Sequence[Number | None]
Curve = tuple[Sequence[Number], Optionals]
Ends = tuple[Optionals, Optionals]  # the lower and the upper ends of intervals
NO_ENDS: Mapping[str, Ends] = MappingProxyType({})


@dataclass(frozen=True)
class Bars:
    """Groups of bars, one group per label and one bar per series; None leaves a gap."""

    labels: Sequence[str]
    series: Mapping[str, Optionals]
    title: str = ""
    unit: str = ""
    ends: Mapping[str, Ends] = field(default_factory=dict)
    note: str = ""

    def known_values(self) -> list[Number]:
        """Return all values but None and nan."""
        return [x for row in self.series.values() for x in row if x is not None and x == x]


@dataclass(frozen=True)
class Curves:
    """Curves with bands, each with its own places along x; None leaves a gap."""

    series: Mapping[str, Curve]
    title: str = ""
    unit: str = ""
    ends: Mapping[str, Ends] = field(default_factory=dict)
    x_label: str = "phase"
    log_x: bool = False
    note: str = ""

    def known_values(self) -> list[Number]:
        """Return all values but None and nan."""
        return [x for _, row in self.series.values() for x in row if x is not None and x == x]


@dataclass(frozen=True)
class Strip:
    """Texts whose tokens are colored by a value each; rows of label, tokens and values."""

    rows: Sequence[tuple[str, Sequence[str], Optionals]]
    title: str = ""
    unit: str = ""
    kind: Kind = "diverging"


@dataclass(frozen=True)
class Matrix:
    """A grid of colors; `limits` are the ends of the scale, by default those of the values.

    Columns are named by their numbers if `cols` has not one name for each.
    """

    values: Sequence[Optionals]
    rows: Sequence[str]
    cols: Sequence[str]
    title: str = ""
    unit: str = ""
    kind: Kind = "sequential"
    limits: tuple[Number, Number] | None = None
    note: str = ""
    ends: tuple[Sequence[Optionals], Sequence[Optionals]] | None = None  # of the first rows

    @property
    def names(self) -> Sequence[str]:
        """The names of the columns."""
        n = max(map(len, self.values), default=0)
        return self.cols if len(self.cols) == n else list(map(str, range(n)))

    def known_values(self) -> list[Number]:
        """Return all values but None and nan."""
        return [x for row in self.values for x in row if x is not None and x == x]


@dataclass(frozen=True)
class Table:
    """Rows of numbers and words."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""
    note: str = ""


Kinds = Bars | Curves | Strip | Matrix | Table


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
        return {"image/svg+xml": self.svg, "text/html": self._repr_html_(), "text/plain": self.alt}

    def _repr_html_(self) -> str:
        data = base64.b64encode(self.svg.encode()).decode()
        return f'<img alt="{escape(self.alt)}" src="data:image/svg+xml;base64,{data}">'

    def inline(self) -> str:
        """Return the drawing as part of a page that has `marks.SVG_STYLE`, with its tooltips."""
        return self.svg.replace(STYLE_ELEMENT, "").replace(
            ' xmlns="http://www.w3.org/2000/svg"', ""
        )


def is_number(x: Number | None) -> bool:
    """Return True unless x is missing, infinite or not a number."""
    return x is not None and x - x == 0


def format_value(label: str, value: Number, low: Number | None = None, high: Number | None = None):
    """Return the title of a mark: its label, the stored number and the interval."""
    ends = f" [{low:.9g}, {high:.9g}]" if is_number(low) and is_number(high) else ""
    return f"{label}: {value:.9g}{ends}"


def quantile_limit(values: Optionals, quantile: float = 0.99) -> float:
    """Return the quantile of the sizes of the finite values, or the largest if that is 0."""
    sizes = sorted(abs(x) for x in values if is_number(x)) or [0.0]
    return float(sizes[min(len(sizes) - 1, int(quantile * len(sizes)))] or sizes[-1])
