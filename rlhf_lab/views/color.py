"""Color scales for numbers, safe for color-blind readers, with legible text on them."""

import math
from typing import Literal

Kind = Literal["diverging", "sequential"]
Rgb = tuple[int, int, int]
Number = float | int

ORANGE, NEUTRAL, BLUE = (213, 94, 0), (242, 242, 242), (0, 114, 178)
PALE, DEEP = (242, 242, 242), (0, 78, 124)
BLACK, WHITE = (0, 0, 0), (255, 255, 255)


def blend(low: Rgb, high: Rgb, fraction: float) -> Rgb:
    """Return the color at a fraction of the way between two colors."""
    red, green, blue = (round(a + (b - a) * fraction) for a, b in zip(low, high, strict=True))
    return red, green, blue


def color_of(value: float | int, limit: float | int, kind: Kind = "diverging") -> Rgb:
    """Return the color of a number; beyond the limit it stays that of the limit, nan is 0.

    Diverging: orange at -limit, nearly white at 0, blue at limit (Okabe and Ito 2008).
    Sequential: nearly white at 0, deep blue at limit.
    """
    size = 0.0 if limit <= 0 or math.isnan(value) else max(-1.0, min(1.0, value / limit))
    if kind == "sequential":
        return blend(PALE, DEEP, max(0.0, size))
    return blend(NEUTRAL, BLUE if size > 0 else ORANGE, abs(size))


def luminance(color: Rgb) -> float:
    """Return the relative luminance, from 0 for black to 1 for white (WCAG 2.2)."""
    parts = [channel / 255 for channel in color]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: Rgb, other: Rgb) -> float:
    """Return the contrast ratio of two colors, from 1 to 21 (WCAG 2.2)."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def ink_on(background: Rgb) -> Rgb:
    """Return black or white: the color with the higher contrast."""
    return max((BLACK, WHITE), key=lambda ink: contrast(ink, background))


def css(color: Rgb) -> str:
    """Return a color as a hexadecimal number."""
    return "#{:02x}{:02x}{:02x}".format(*color)


def rich_style(background: Rgb) -> str:
    """Return a style of rich: legible text on a background."""
    return "rgb({},{},{}) on rgb({},{},{})".format(*ink_on(background), *background)
