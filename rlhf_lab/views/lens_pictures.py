"""Pictures of LensDivergence: the KL between two models' lenses, by layer and by token."""

from collections.abc import Sequence
from typing import Any

import torch

from rlhf_lab.probes import Run
from rlhf_lab.views.picture import Picture
from rlhf_lab.views.plots import curves, heatmap

LENS_NAMES = {"raw": "logit lens", "tuned": "tuned lens"}
SHOWN_COLUMNS = 60


def lens_divergence_parts(
    run: Run, name: str, records: Sequence[dict[str, Any]]
) -> list[Picture | str]:
    """Of the last record: both lenses by layer, then each by layer and token."""
    last = records[-1]
    tensors = run.tensors(name, last["phase"])
    if not tensors["raw"].any():
        return [f"<p>No layer diverges at phase {last['phase']}: the models say the same.</p>"]
    there = {lens: label for lens, label in LENS_NAMES.items() if lens in last}
    n = {"raw": last["n"], "tuned": last.get("held_out")}
    labels = {lens: f"{label}, n = {n[lens]}" for lens, label in there.items()}
    places = range(len(last["layers"]))
    series = {labels[lens]: (places, last[lens]) for lens in there}
    bands = {
        labels[lens]: (last[f"{lens}_low"], last[f"{lens}_high"])
        for lens in there
        if f"{lens}_low" in last
    }
    title = f"phase {last['phase']}: KL of the policy's lens from the reference's"
    x_label = f"residual behind {', '.join(last['layers'])}" if len(places) < 7 else "blocks"
    parts: list[Picture | str] = [curves(series, title, x_label, "nats per token", bands=bands)]
    for lens, label in there.items():
        states = tensors["states"][-tensors[lens].shape[1] :]
        count = states.sum(0)
        shown = [t for t in range(len(count)) if count[t]][:SHOWN_COLUMNS]
        grid = tensors[lens].sum(1) / count.clamp(min=1)
        slots = last.get("slots", [str(t + 1) for t in range(len(count))])
        cols = [slots[t] if t < len(slots) else str(t + 1) for t in shown]
        title = f"{label}, by the token that is written next, nats, n = {n[lens]}"
        parts.append(
            heatmap(grid[:, torch.tensor(shown)].flip(0), last["layers"][::-1], cols, title)
        )
    if "tuned" in there:
        left = ", ".join(
            f"{last['layers'][at]} {left:.0%}"
            for at, left in zip(last["tuned_layers"], last["tuned_left"], strict=True)
        )
        parts.append(
            f"<p>The tuned lens's maps, with a penalty of {last['tuned_ridge']:g}, leave of the "
            f"last residual's variance on held-out texts: {left}.</p>"
        )
    return parts
