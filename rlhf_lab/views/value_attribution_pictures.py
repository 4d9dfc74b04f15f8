"""Pictures of value attribution: how much each part makes values differ, slot by slot."""

from collections.abc import Sequence
from html import escape
from typing import Any

from rlhf_lab.probes import Run
from rlhf_lab.views.intervals import HOW
from rlhf_lab.views.picture import Picture
from rlhf_lab.views.plots import bars, heatmap


def value_attribution_parts(
    run: Run, name: str, records: Sequence[dict[str, Any]]
) -> list[Picture | str]:
    """Parts by slots in the first and the last record, or the only one; one slot as bars."""
    parts: list[Picture | str] = []
    for record in [*records[:1], *records[1:][-1:]]:
        slots = record.get("slots", [str(pos) for pos in record["positions"]])
        labels = [f"{slot}, n = {n}" for slot, n in zip(slots, record["n"], strict=True)]
        grid = [list(column) for column in zip(*record["sd"], strict=True)]
        title = f"phase {record['phase']}: standard deviation of each part's share of the value"
        parts.append(heatmap(grid, record["components"], labels, title))
        widest = max(range(len(slots)), key=lambda at: record["value_sd"][at])
        whiskers = {}
        if "sd_low" in record:
            whiskers = {HOW: (record["sd_low"][widest], record["sd_high"][widest])}
        title = f"phase {record['phase']}: the same at {labels[widest]}"
        series = {HOW: record["sd"][widest]}
        parts.append(bars(record["components"], series, title, whiskers=whiskers))
        spreads = ", ".join(
            f"{escape(slot)} {sd:.3g}" for slot, sd in zip(slots, record["value_sd"], strict=True)
        )
        parts.append(
            f"<p>The values themselves have the standard deviations {spreads}, in the head's unit; "
            "a part's share is its deviation from the slot's mean state, through the head. "
            f"{record['dead']:.0%} of the head's hidden units are off in all of these states.</p>"
        )
    return parts
