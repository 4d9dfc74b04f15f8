"""Tokens colored by any number per token, as static HTML and as terminal text."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from jaxtyping import Bool, Float
from rich.color import ColorTriplet
from rich.text import Text
from torch import Tensor

from rlhf_lab.console import visible
from rlhf_lab.views.marks import Kind, Names, Number, Optionals, ink_on, pick_color
from rlhf_lab.views.pictures import Drawn, Html
from rlhf_lab.views.templates import render

Numbers = Sequence[Number] | Float[Tensor, " seq"]
Flags = Sequence[bool] | Bool[Tensor, " seq"]


def tokens_html(
    tokens: Names,
    values: Numbers,
    name: str = "value",
    mask: Flags | None = None,
    limit: Number | None = None,
    kind: Kind = "diverging",
) -> Html:
    """Return one text with each token on a tile colored by its number, which is in the tooltip.

    Tiles have their own text color, so they are legible on light and dark pages.

    Args:
        tokens: pieces that add up to the text, with spaces.
        values: one number per token; nan has no color.
        name: name of the number in the tooltip.
        mask: False for tokens without a number, such as those of the prompt.
        limit: number with the strongest color; the largest in the text if None.
    """
    tiles = _tiles(tokens, values, mask, limit, kind)
    return Html(render("tokens.html", tiles=tiles, name=name, ink_on=ink_on))


def tokens_text(
    tokens: Names,
    values: Numbers,
    mask: Flags | None = None,
    limit: Number | None = None,
    kind: Kind = "diverging",
) -> Text:
    """Return one text for the terminal, each token colored by its number; see `tokens_html`."""
    text = Text()
    for token, number, color, _ in _tiles(tokens, values, mask, limit, kind):
        colors = f"{ink_on(color).rgb} on {color.rgb}" if color else ""
        text.append(visible(token), style="dim" if number is None else colors)
    return text


def color_key(name: str, limit: Number, kind: Kind = "diverging") -> Html:
    """Return tiles with the colors of five numbers from one end of the scale to the other."""
    low = -limit if kind == "diverging" else 0.0
    numbers = [low + (limit - low) * step / 4 for step in range(5)]
    labels = [f" {number:.3g} " for number in numbers]
    key = tokens_html(labels, numbers, name, limit=limit, kind=kind).fragment
    return Html(f'<div style="margin-top:.6rem"><small>{escape(name)}</small>{key}</div>')


@dataclass(frozen=True)
class Strip(Drawn):
    """Texts whose tokens are colored by a value each; rows of label, tokens and values."""

    rows: Sequence[tuple[str, Names, Optionals]]
    title: str
    unit: str
    kind: Kind = "diverging"

    @property
    def fragment(self) -> str:
        """The texts below the key of their colors; the script of a page sets the styles."""
        limit = quantile_limit([x for _, _, row in self.rows for x in row])
        lines = []
        for label, tokens, row in self.rows:
            known, numbers = [x is not None for x in row], [float(x or 0) for x in row]
            tiles = tokens_html(tokens, numbers, self.unit, known, limit, self.kind)
            lines.append((label, tiles.fragment))
        key = color_key(self.unit, limit, self.kind).fragment
        strip = render("strip.html", strip=self, lines=lines, key=key, limit=limit)
        return strip.replace(' style="', ' data-style="')


def quantile_limit(values: Optionals, quantile: float = 0.99) -> float:
    """Return the quantile of the sizes of the finite values, or the largest if that is 0."""
    sizes = sorted(abs(x) for x in values if x is not None and math.isfinite(x)) or [0.0]
    return float(sizes[min(len(sizes) - 1, int(quantile * len(sizes)))] or sizes[-1])


def _tiles(
    tokens: Names, values: Numbers, mask: Flags | None, limit: Number | None, kind: Kind
) -> Iterator[tuple[str, float | None, ColorTriplet | None, bool]]:
    """Yield tokens on one line with number and color, if known, and True beyond the limit."""
    numbers = values.tolist() if isinstance(values, Tensor) else [float(x) for x in values]
    mask = [True] * len(numbers) if mask is None else list(map(bool, mask))
    known = [abs(x) for x, real in zip(numbers, mask, strict=True) if real and math.isfinite(x)]
    limit = max(known, default=0.0) if limit is None else limit
    for token, x, real in zip(tokens, numbers, mask, strict=True):
        text = token.replace("\r", "").replace("\n", "↵").replace("\t", " ")
        color = pick_color(x, limit, kind) if real and not math.isnan(x) else None
        yield text, x if real else None, color, 0 < limit * 1.0001 < abs(x)
