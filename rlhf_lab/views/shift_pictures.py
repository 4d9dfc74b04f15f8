"""Pictures of a shift's causes, by part: own weights, inherited input, scale and read-out."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.probes import Run
from rlhf_lab.views import html
from rlhf_lab.views.intervals import HOW, bracketed, mean_of_rows, whisker_ends
from rlhf_lab.views.picture import Picture
from rlhf_lab.views.plots import bars, curves

CAUSES_BY_FIELD = {
    "own_weights": "own weights",
    "inherited": "inherited from earlier parts",
    "scale": "the norm's scale",
    "read_out": "read-out",
}
MOST_PARTS = 24
"""Parts that are drawn; a model of 30 layers has hundreds."""
Tensors = Mapping[str, Float[Tensor, "..."]]


def shift_parts(
    run: Run, name: str, records: Sequence[dict[str, Any]], what: str
) -> list[Picture | str]:
    """The parts of a shift in the last phase, by cause and as a table; its sum over phases.

    Args:
        what: the words whose logits are compared.
    """
    last, tensors = largest_parts(records[-1], run.tensors(name, records[-1]["phase"]))
    n = tensors["shift"].shape[-1]
    title = f"phase {last['phase']}: shift of logit({what}), n = {n}; "
    title += f"{_measured(tensors, last)} in all"
    whiskers = {"shift": whisker_ends(mean_of_rows(tensors["shift"]))}
    parts: list[Picture | str] = [
        bars(last["components"], {"shift": last["shift"]}, title, whiskers=whiskers)
    ]
    if "own_weights" in last:
        parts.append(cause_bars(last, tensors))
    parts.append(_table(last, tensors))
    parts.append(f"<p>Whiskers and brackets: {HOW}, of which there are {n}.</p>")
    phases = [record["phase"] for record in records]
    ends = [_ends_of_sum(run.tensors(name, phase)) for phase in phases]
    low, high = zip(*ends, strict=True)
    label, values = "shift", [record["measured_shift"] for record in records]
    title = f"shift of logit({what})"
    return [*parts, curves({label: (phases, values)}, title, bands={label: (low, high)})]


def largest_parts(record: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """A record with its largest parts by their shift or one of its causes, and all others as one.

    As it is where it has no more than `MOST_PARTS`. Sums over parts are the same.
    """
    names = record["components"]
    if len(names) <= MOST_PARTS:
        return record, tensors
    columns = [
        field for field in ("shift", "policy", "reference", *CAUSES_BY_FIELD) if field in record
    ]
    sized = ("shift", *(field for field in CAUSES_BY_FIELD if field in record))
    size = [max(abs(record[field][i]) for field in sized) for i in range(len(names))]
    order = sorted(range(len(names)), key=lambda i: -size[i])
    kept, rest = sorted(order[: MOST_PARTS - 1]), sorted(order[MOST_PARTS - 1 :])
    fewer = {
        field: [*(record[field][i] for i in kept), sum(record[field][i] for i in rest)]
        for field in columns
    }
    fewer["components"] = [*(names[i] for i in kept), f"{len(rest)} others"]
    rows = {
        field: torch.cat([x[kept], x[rest].sum(0, keepdim=True)])
        for field, x in tensors.items()
        if field in columns
    }
    return record | fewer, dict(tensors) | rows


def cause_bars(record: dict[str, Any], tensors: Tensors) -> Picture:
    """The causes of the shift of each part, and in the legend what each cause is in all."""
    causes, whiskers = {}, {}
    for field, label in CAUSES_BY_FIELD.items():
        (low,), (high,) = whisker_ends(mean_of_rows(tensors[field].sum(0, keepdim=True)))
        total = f"{sum(record[field]):+.3g}"
        total += f" [{low:+.3g}, {high:+.3g}]" if low is not None else ""
        causes[f"{label}, {total} in all"] = record[field]
        whiskers[f"{label}, {total} in all"] = whisker_ends(mean_of_rows(tensors[field]))
    title = f"phase {record['phase']}: the shift by its causes"
    return bars(record["components"], causes, title, whiskers=whiskers)


def _table(record: dict[str, Any], tensors: Tensors) -> str:
    """What each part says for the word in either model, and the difference with its interval."""
    low, high = whisker_ends(mean_of_rows(tensors["shift"]))
    before = whisker_ends(mean_of_rows(tensors["reference"]))
    now = whisker_ends(mean_of_rows(tensors["reference"] + tensors["shift"]))
    columns = (
        (record["reference"], *before),
        (record["policy"], *now),
        (record["shift"], low, high),
    )
    cells = [[bracketed(*cell) for cell in zip(*column, strict=True)] for column in columns]
    rows = [list(row) for row in zip(record["components"], *cells, strict=True)]
    return html.table(["part", "reference", "policy", "shift"], rows)


def _measured(tensors: Tensors, record: dict[str, Any]) -> str:
    """The whole shift with its interval."""
    low, high = _ends_of_sum(tensors)
    ends = "" if low is None else f" [{low:+.3f}, {high:+.3f}]"
    return f"{record['measured_shift']:+.3f}{ends}"


def _ends_of_sum(tensors: Tensors) -> tuple[float | None, float | None]:
    (low,), (high,) = whisker_ends(mean_of_rows(tensors["measured"][None]))
    return low, high
