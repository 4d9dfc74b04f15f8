"""Selection among layers and slots: the best cell, its interval, and how many were compared."""

from collections.abc import Sequence
from html import escape
from typing import Any


def _sequences(record: dict[str, Any]) -> int | None:
    """The sequences that were held out."""
    return record.get("held_out", record.get("sequences", {}).get("held"))


def best_cell(
    record: dict[str, Any],
    name: str,
    grid: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    slots: Sequence[str],
) -> str:
    """A sentence on the best cell of a grid: its interval, and among how many it was selected."""
    cells = [(x, i, j) for i, row in enumerate(grid) for j, x in enumerate(row) if x is not None]
    low, high = record.get(f"{name}_low"), record.get(f"{name}_high")
    if not cells or low is None or high is None:
        return ""
    best, i, j = max(cells)
    widths = [high[k][m] - low[k][m] for _, k, m in cells if None not in (low[k][m], high[k][m])]
    widest = f"; the widest interval of all is {max(widths):.2f} wide" if widths else ""
    ends = f"[{low[i][j]:.2f}, {high[i][j]:.2f}]" if low[i][j] is not None else "no interval"
    return (
        f"<p>Best of the {len(cells)} compared: {best:.2f} {ends} at {escape(rows[i])}, "
        f"{escape(slots[j])} (95 %, bootstrap over {_sequences(record)} held-out "
        f"sequences){widest}.</p>"
    )
