"""Text graphics for the terminal: sparklines, and a table of samples."""

import math
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from rlhf_lab.console import visible
from rlhf_lab.views.color import BLUE, ORANGE, blend

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], width: int = 40) -> str:
    """Return the last `width` values as bars between their minimum and maximum.

    Values that are None or not finite are left out.
    """
    shown = [value for value in values if value is not None and math.isfinite(value)][-width:]
    low, span = min(shown, default=0.0), max(shown, default=0.0) - min(shown, default=0.0)
    return "".join(BARS[round((x - low) / (span or 1.0) * (len(BARS) - 1))] for x in shown)


def reward_color(value: float, low: float, high: float) -> str:
    """Return a color between orange (low) and blue (high); equal three decimals look equal."""
    value, low, high = (round(number, 3) for number in (value, low, high))
    share = 0.5 if high <= low else min(1.0, max(0.0, (value - low) / (high - low)))
    return "rgb({},{},{})".format(*blend(ORANGE, BLUE, share))


def in_one_line(text: str) -> str:
    """Return a text without line breaks."""
    return text.replace("\n", " ")


def sample_table(
    texts: Sequence[str],
    rewards: Sequence[float],
    prompt: str = "",
    title: str = "sample",
    tokens: Sequence[Sequence[int]] | None = None,
) -> Table:
    """Return a table of samples, colored by reward, with the prompt dimmed.

    Args:
        tokens: the token ids of each, for another column, such as `samples.tokens.tolist()`.
    """
    table = Table(box=None, padding=(0, 1), expand=True)
    table.add_column("reward", justify="right", no_wrap=True)
    table.add_column(title, ratio=1)
    if tokens is not None:
        table.add_column("token ids", ratio=1)
    rows = [[]] * len(texts) if tokens is None else [[" ".join(map(str, row))] for row in tokens]
    for text, reward, ids in zip(texts, rewards, rows, strict=True):
        shown = Text(visible(in_one_line(text)))
        if prompt and text.startswith(prompt):
            shown.stylize("dim", 0, len(visible(prompt)))
        color = reward_color(reward, min(rewards), max(rewards))
        ids = [Text(x, style="dim") for x in ids]
        table.add_row(Text(f"{reward:.3f}", style=f"bold {color}"), shown, *ids)
    return table
