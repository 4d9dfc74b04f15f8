"""Pictures of the KL's attribution: through which output it shows, and by whose weights it is."""

from collections.abc import Sequence
from typing import Any

from rlhf_lab.probes import Run
from rlhf_lab.views.picture import Picture
from rlhf_lab.views.plots import bars, heatmap

SHOWN_PARTS, SHOWN_PLACES = 24, 60


def kl_attribution_parts(
    run: Run, name: str, records: Sequence[dict[str, Any]]
) -> list[Picture | str]:
    """Of the last record: both splits beside each other, and the first by position."""
    last = records[-1]
    if not last["kl"]:
        return [f"<p>The KL is 0 at phase {last['phase']}: the models are equal.</p>"]
    of = f"phase {last['phase']}: {last['kl']:.3f} nats per sequence"
    parts: list[Picture | str] = [
        '<div class="figures">',
        _bars(last, "components", "output", f"{of}, through which output, n = {last['n']}"),
    ]
    if "weights" in last:
        n = len(last["weight_parts"])
        title = f"{of}, by whose weights, n = {last['n']} in {n} batches"
        parts.append(_bars(last, "groups", "weights", title))
    parts.append("</div>")
    parts.append(
        "<p>A part is charged through its output also with what earlier parts sent it, and by its "
        "weights with what they do through later ones. Whiskers: 95 %, bootstrap over sequences, "
        "or over batches of them.</p>"
    )
    chosen = _largest(last["output"])
    grid = run.tensors(name, last["phase"])["by_position"][chosen, :SHOWN_PLACES]
    there = grid.abs().sum(0) > 0
    slots = last.get("slots", [str(place + 1) for place in range(grid.shape[1])])
    cols = [slot for slot, used in zip(slots, there.tolist(), strict=False) if used]
    rows = [last["components"][i] for i in chosen]
    title = "KL through outputs, by the token that is written next, nats"
    return [*parts, heatmap(grid[:, there], rows, cols, title, kind="diverging")]


def _largest(values: Sequence[float]) -> list[int]:
    """The parts that are shown, in their own order."""
    order = sorted(range(len(values)), key=lambda i: -abs(values[i]))
    return sorted(order[:SHOWN_PARTS])


def _bars(record: dict[str, Any], names: str, field: str, title: str) -> Picture:
    chosen = _largest(record[field])
    ends = {}
    if f"{field}_low" in record:
        ends = {
            field: tuple([record[f"{field}_{end}"][i] for i in chosen] for end in ("low", "high"))
        }
    found = {field: [record[field][i] for i in chosen]}
    return bars([record[names][i] for i in chosen], found, title, whiskers=ends)
