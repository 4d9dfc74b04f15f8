"""Pictures of a shift's causes, by part: own weights, inherited input, scale and read-out."""

from typing import Any

from rlhf_lab.views.plots import Picture, bars

CAUSES_BY_FIELD = {
    "own_weights": "own weights",
    "inherited": "inherited from earlier parts",
    "scale": "the norm's scale",
    "read_out": "read-out",
}


def cause_bars(record: dict[str, Any]) -> Picture:
    """The causes of the shift of each part, and in the legend what each cause is in all."""
    causes = {
        f"{label}, {sum(record[field]):+.2f} in all": record[field]
        for field, label in CAUSES_BY_FIELD.items()
    }
    return bars(record["components"], causes, f"phase {record['phase']}: the shift by its causes")
