"""Pictures of Fisher's information: where the KL leaves its quadratic form, and block by block."""

from collections.abc import Sequence
from typing import Any

from rlhf_lab.probes import Run
from rlhf_lab.views.picture import Picture
from rlhf_lab.views.plots import bars, curves

FORMS = {"quad": "half of delta' F delta", "kl": "exact KL"}


def fisher_parts(run: Run, name: str, records: Sequence[dict[str, Any]]) -> list[Picture | str]:
    """The ratio over the share of the step in every record, and the last one's blocks."""
    moved = [record for record in records if None not in record["ratio"]]
    if not moved:
        return ["<p>No weight has moved.</p>"]
    last = moved[-1]
    series = {f"phase {record['phase']}": (record["a"], record["ratio"]) for record in moved}
    title = "KL by its quadratic form, at shares of the way from the reference"
    parts: list[Picture | str] = [curves(series, title, x_label="share of the change")]
    found = {label: last[field] for field, label in FORMS.items()}
    ends = {
        label: (last[f"{field}_low"], last[f"{field}_high"])
        for field, label in FORMS.items()
        if f"{field}_low" in last
    }
    title = f"phase {last['phase']}: each block moved alone, nats per sequence, n = {last['n']}"
    return [*parts, bars(last["groups"], found, title, whiskers=ends)]
