"""Color scales for numbers, safe for colour-blind readers, with legible text on them."""

import math
from typing import Literal

Kind = Literal["diverging", "sequential"]
Rgb = tuple[int, int, int]
Number = float | int

ORANGE, NEUTRAL, BLUE = (213, 94, 0), (242, 242, 242), (0, 114, 178)
PALE, DEEP = (242, 242, 242), (0, 78, 124)
BLACK, WHITE = (0, 0, 0), (255, 255, 255)


def blend(low: Rgb, high: Rgb, share: float) -> Rgb:
    """The colour that lies a share of the way from one to the other."""
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(low, high, strict=True))
    return red, green, blue


def color_of(value: float | int, limit: float | int, kind: Kind = "diverging") -> Rgb:
    """The colour of a number.

    1. Diverging: orange at -limit, nearly white at 0, blue at limit (Okabe and Ito 2008).
    2. Sequential: nearly white at 0, deep blue at limit.
    3. Beyond the limit the colour stays that of the limit.
    4. What is not a number has the colour of 0.
    """
    share = 0.0 if limit <= 0 or math.isnan(value) else max(-1.0, min(1.0, value / limit))
    if kind == "sequential":
        return blend(PALE, DEEP, max(0.0, share))
    return blend(NEUTRAL, BLUE if share > 0 else ORANGE, abs(share))


def luminance(color: Rgb) -> float:
    """Relative luminance, from 0 for black to 1 for white (WCAG 2.2)."""
    parts = [channel / 255 for channel in color]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: Rgb, other: Rgb) -> float:
    """The contrast ratio of two colours, from 1 to 21 (WCAG 2.2)."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def ink_on(background: Rgb) -> Rgb:
    """Black or white: the one with the higher contrast on a background."""
    return max((BLACK, WHITE), key=lambda ink: contrast(ink, background))


def css(color: Rgb) -> str:
    """Return a color as a hexadecimal number."""
    return "#{:02x}{:02x}{:02x}".format(*color)


def rich_style(background: Rgb) -> str:
    """Legible text on a background, in rich's words."""
    return "rgb({},{},{}) on rgb({},{},{})".format(*ink_on(background), *background)
