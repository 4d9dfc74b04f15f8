"""Pictures of ComponentTransplant: what each part earns put in, taken out, and by Shapley."""

from collections.abc import Sequence
from typing import Any

from rlhf_lab.probes import Run
from rlhf_lab.views.picture import Picture
from rlhf_lab.views.plots import bars

LABELS = {"put_in": "put in", "taken_out": "taken out", "shapley": "Shapley"}


def component_transplant_parts(
    run: Run, name: str, records: Sequence[dict[str, Any]]
) -> list[Picture | str]:
    """Three bars for each part of the last record, with intervals over samples."""
    last = records[-1]
    tensors = run.tensors(name, last["phase"])
    series = {label: tensors[field][:, 0].tolist() for field, label in LABELS.items()}
    ends = {
        label: (tensors[field][:, 1].tolist(), tensors[field][:, 2].tolist())
        for field, label in LABELS.items()
    }
    title = f"phase {last['phase']}: reward by part, {last['gain']:+.3f} in all, n = {last['n']}"
    return [bars(last["groups"], series, title, "reward", whiskers=ends)]
