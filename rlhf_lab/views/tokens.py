"""Tokens coloured by any per-token quantity, as static HTML and as terminal text."""

import math
from collections.abc import Iterator, Sequence
from html import escape

from jaxtyping import Bool, Float
from rich.text import Text
from torch import Tensor

from rlhf_lab.console import visible
from rlhf_lab.views.color import Kind, Rgb, color_of, css, ink_on, rich_style
from rlhf_lab.views.html import Html

Numbers = Sequence[float | int] | Float[Tensor, " seq"]
Flags = Sequence[bool] | Bool[Tensor, " seq"]
TILE = "padding:1px 2px;margin:1px;border-radius:3px;white-space:pre;display:inline-block"


def largest(values: Numbers, mask: Flags | None = None) -> float:
    """The largest size of a number that counts; 0 when none does."""
    numbers, counts = _plain(values, mask)
    sizes = [abs(x) for x, real in zip(numbers, counts, strict=True) if real and math.isfinite(x)]
    return max(sizes, default=0.0)


def tokens_html(
    tokens: Sequence[str],
    values: Numbers,
    name: str = "value",
    mask: Flags | None = None,
    limit: float | int | None = None,
    kind: Kind = "diverging",
) -> Html:
    """One text, each token on a tile coloured by its number, which is in the tooltip.

    Tiles bring their own ink, so that they are legible on light and dark pages. A number that is
    nan has no colour.

    Args:
        tokens: as they add to the text, blanks included.
        values: one per token.
        name: what the number is, for the tooltip.
        mask: False on tokens without a number, such as the prompt's; they stay uncoloured.
        limit: the number with the strongest colour; the largest in the text when None.

    Raises ValueError when tokens, values and mask are not of one length.
    """
    spans, end = [], largest(values, mask) if limit is None else limit
    for shown, number, background in _tiles(tokens, values, mask, limit, kind):
        style, title = f"{TILE};opacity:.7", ""
        if number is not None:
            is_far = end > 0 and abs(number) > end * 1.0001
            beyond = ", beyond the scale" if is_far else ""
            style = TILE + ";text-decoration:underline dotted" * is_far
            title = f' title="{escape(name)} {number:.9g}{beyond}"'
        if background is not None:
            style += f";background:{css(background)};color:{css(ink_on(background))}"
        spans.append(f'<span style="{style}"{title}>{escape(shown)}</span>')
    line = "font-family:ui-monospace,monospace;font-size:13px;line-height:1.7"
    return Html(f'<div style="{line}">{"".join(spans)}</div>')


def tokens_text(
    tokens: Sequence[str],
    values: Numbers,
    mask: Flags | None = None,
    limit: float | int | None = None,
    kind: Kind = "diverging",
) -> Text:
    """One text for the terminal, each token coloured by its number; see `tokens_html`."""
    text = Text()
    for shown, number, background in _tiles(tokens, values, mask, limit, kind):
        style = "dim" if number is None else ""
        text.append(visible(shown), style=style if background is None else rich_style(background))
    return text


def color_key(name: str, limit: float | int, kind: Kind = "diverging") -> Html:
    """What the colours mean: tiles at the ends of the scale and in between."""
    low = -1.0 if kind == "diverging" else 0.0
    shares = [low + (1 - low) * step / 4 for step in range(5)]
    numbers = [share * limit for share in shares]
    labels = [f" {number:.3g} " for number in numbers]
    key = tokens_html(labels, numbers, name, limit=limit, kind=kind)
    return Html(f'<div style="margin-top:.6rem"><small>{escape(name)}</small>{key.fragment}</div>')


def _plain(values: Numbers, mask: Flags | None) -> tuple[list[float], list[bool]]:
    """Numbers and mask as lists; all True without a mask."""
    numbers = values.tolist() if isinstance(values, Tensor) else [float(x) for x in values]
    if mask is None:
        return numbers, [True] * len(numbers)
    return numbers, mask.tolist() if isinstance(mask, Tensor) else list(mask)


def _tiles(
    tokens: Sequence[str],
    values: Numbers,
    mask: Flags | None,
    limit: float | int | None,
    kind: Kind,
) -> Iterator[tuple[str, float | None, Rgb | None]]:
    """Each token on one line, with its number and colour, if it has them."""
    numbers, counts = _plain(values, mask)
    if not len(tokens) == len(numbers) == len(counts):
        raise ValueError(
            f"tokens has {len(tokens)} entries, values {len(numbers)}, mask {len(counts)}; "
            "give one of each per token."
        )
    limit = largest(values, mask) if limit is None else limit
    for token, number, real in zip(tokens, numbers, counts, strict=True):
        shown = token.replace("\r", "").replace("\n", "↵").replace("\t", " ")
        colored = real and not math.isnan(number)
        background = color_of(number, limit, kind) if colored else None
        yield shown, number if real else None, background
