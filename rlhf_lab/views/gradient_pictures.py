"""Pictures of GradTerms: how hard each term pulls on each part, and how the terms agree."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from rlhf_lab.probes import Run
from rlhf_lab.views.picture import Picture
from rlhf_lab.views.plots import bars, curves, heatmap

LEAST_PULL = 1e-6
"""Of the largest norm: below it a gradient is rounding, and its cosines are not drawn."""


def grad_terms_parts(run: Run, name: str, records: Sequence[dict[str, Any]]) -> list[Picture | str]:
    """Norms by part of the last phase; cosines of whole gradients, last and over phases."""
    last = records[-1]
    found = run.tensors(name, last["phase"])
    labels = [term.replace("_", " ") for term in last["terms"]]
    norms = dict(zip(labels, found["norms"].tolist(), strict=True))
    where = f"phase {last['phase']}, step {last['step'] + 1} of {last['steps']}"
    whole = found["cosines"][..., -1].tolist()
    series = {}
    tensors = [run.tensors(name, record["phase"]) for record in records]
    phases = [record["phase"] for record in records]
    for a, b in combinations(range(len(labels)), 2):
        pulls = [t["norms"][[a, b], -1].min() > LEAST_PULL * t["norms"].max() for t in tensors]
        values = [
            t["cosines"][a, b, -1].item() if pull else None
            for t, pull in zip(tensors, pulls, strict=True)
        ]
        if any(pulls):
            series[f"{labels[a]}, {labels[b]}"] = (phases, values)
    over = {
        label: (phases, [t["norms"][row, -1].item() for t in tensors])
        for row, label in enumerate(labels)
    }
    grid = heatmap(whole, labels, labels, f"{where}: cosines of terms", "diverging", (-1.0, 1.0))
    parts = [bars(last["groups"], norms, f"{where}: norm of each term's gradient"), grid]
    parts += ['<div class="figures">', curves(over, "norm of each term's whole gradient")]
    if series:
        parts.append(curves(series, "cosine of two terms' whole gradients"))
    return [*parts, "</div>"]
