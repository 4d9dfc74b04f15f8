"""Text graphics for the terminal: sparklines, and a table of samples."""

import math
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from rlhf_lab.console import visible
from rlhf_lab.views.color import BLUE, ORANGE, blend

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], width: int = 40) -> str:
    """A curve in one line: the last `width` values, as bars between their minimum and maximum.

    Values that are None or not finite are left out.
    """
    shown = [value for value in values if value is not None and math.isfinite(value)][-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    span = high - low
    if span == 0:
        return BARS[0] * len(shown)
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in shown)


def reward_color(value: float, low: float, high: float) -> str:
    """A colour between orange (low) and blue (high), which colour-blind readers can tell apart.

    What is printed alike, with three decimals, is coloured alike.
    """
    value, low, high = (round(number, 3) for number in (value, low, high))
    share = 0.5 if high <= low else min(1.0, max(0.0, (value - low) / (high - low)))
    return "rgb({},{},{})".format(*blend(ORANGE, BLUE, share))


def in_one_line(text: str) -> str:
    """A text in one line."""
    return text.replace("\n", " ")


def sample_table(
    texts: Sequence[str],
    rewards: Sequence[float],
    prompt: str = "",
    title: str = "sample",
    tokens: Sequence[Sequence[int]] | None = None,
) -> Table:
    """Samples, under a title, with their rewards, coloured by reward; the prompt is dimmed.

    Args:
        tokens: the token ids of each, for a column of their own, such as `samples.tokens.tolist()`.
    """
    table = Table(box=None, padding=(0, 1), expand=True)
    table.add_column("reward", justify="right", no_wrap=True)
    table.add_column(title, ratio=1)
    if tokens is not None:
        table.add_column("token ids", ratio=1)
    rows = [""] * len(texts) if tokens is None else [" ".join(map(str, row)) for row in tokens]
    for text, reward, ids in zip(texts, rewards, rows, strict=True):
        shown = Text(visible(in_one_line(text)))
        if prompt and text.startswith(prompt):
            shown.stylize("dim", 0, len(visible(prompt)))
        color = reward_color(reward, min(rewards), max(rewards))
        of_ids = () if tokens is None else (Text(ids, style="dim"),)
        table.add_row(Text(f"{reward:.3f}", style=f"bold {color}"), shown, *of_ids)
    return table
