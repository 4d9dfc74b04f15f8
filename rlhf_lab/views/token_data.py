"""Numbers of each token of the stored texts, and of each slot, for the token panel."""

from collections.abc import Iterator
from typing import Any

from rlhf_lab.console import visible
from rlhf_lab.probes import Run
from rlhf_lab.probes.text_heatmap import FIELDS
from rlhf_lab.views.records import Snapshot, short_site, slots

TOKEN_COLUMNS = {field: field.replace("_", " ") for field in FIELDS}
TOKEN_COLUMNS |= {"true_advantage": "exact advantage", "true_value": "exact value"}


def collect_tokens(run: Run) -> dict[int, dict[str, Any]]:
    """Return the texts of each record of TextHeatmap by phase, with facts about their slots.

    A fact comes from the latest record that is not after the phase; it begins after the prompt.
    """
    kl, lens = (_records(run, kind) for kind in ("KLByPosition", "ValueLens"))
    found = {}
    for at in _records(run, "TextHeatmap"):
        facts: list[dict[str, Any]] = []
        for records, read in ((kl, _kl_facts), (lens, _value_facts)):
            earlier = [other for other in records if other.phase <= at.phase]
            for label, names, values in read(earlier[-1], at["prefix_len"]) if earlier else ():
                phase = earlier[-1].phase
                facts.append({"label": label, "phase": phase, "names": names, "values": values})
        found[at.phase] = {"probe": at.name, "facts": facts} | _texts(at)
    return found


def _records(run: Run, kind: str) -> list[Snapshot]:
    name = run.find_probe(kind)
    return [Snapshot(run, name, record) for record in run.records(name)] if name else []


def _texts(at: Snapshot) -> dict[str, Any]:
    """Return tokens, rewards and columns; a token without a number has None."""
    columns = {}
    for field, label in TOKEN_COLUMNS.items():
        values = at.get(field)
        mask = at["truth_mask" if field.startswith("true_") else "mask"] if values else None
        if values and mask:
            columns[label] = [
                [round(x, 5) if known else None for x, known in zip(row, real, strict=True)]
                for row, real in zip(values, mask, strict=True)
            ]
    tokens = [[visible(token) for token in row] for row in at["tokens"]]
    return {"tokens": tokens, "start": at["prefix_len"], "rewards": at["rewards"]} | {
        "columns": columns
    }


def _kl_facts(at: Snapshot, start: int) -> Iterator[tuple[str, list[str], list[Any]]]:
    n = at["sequences"]["exact"]
    yield f"mean KL in nats, n = {n}", slots(at, len(at["kl"])), at["kl"]


def _value_facts(at: Snapshot, start: int) -> Iterator[tuple[str, list[str], list[Any]]]:
    names, against = (at.get("slots") or [])[start:], at.get("r2_against")
    if not names or not against:
        return
    correlations = (at.get("head_correlation") or [])[start:]
    yield f"correlation of value and {against} after it", names, correlations
    r2, defined = at.get("r2") or [], at.get("defined") or []
    for site, row, is_defined in zip(at["sites"], r2, defined, strict=False):
        values = [x if known else None for x, known in zip(row, is_defined, strict=True)][start:]
        yield f"R2 of {against} at {short_site(site)} after it", names, values
