"""Numbers of each token of the stored texts, and of each slot, for the token panel."""

from collections.abc import Mapping
from typing import Any

from rlhf_lab.console import visible
from rlhf_lab.probes import Run
from rlhf_lab.probes.text_heatmap import FIELDS
from rlhf_lab.views.records import Snapshot, short_site

TOKEN_COLUMNS = {field: field.replace("_", " ") for field in FIELDS}
TOKEN_COLUMNS |= {"true_advantage": "exact advantage", "true_value": "exact value"}
Phases = Mapping[int, Snapshot]


def collect_tokens(run: Run, kinds: Mapping[str, str]) -> dict[int, dict[str, Any]]:
    """Return the texts of each record of TextHeatmap by phase, with facts about their slots.

    A fact comes from the latest record that is not after the phase; it begins after the prompt.
    """
    heatmaps = _records(run, kinds, "TextHeatmap")
    others = [_records(run, kinds, kind) for kind in ("KLByPosition", "ValueLens")]
    found = {}
    for phase, at in heatmaps.items():
        facts: list[dict[str, Any]] = []
        for records, read in zip(others, (_kl_facts, _value_facts), strict=True):
            earlier = [p for p in records if p <= phase]
            facts += read(records[max(earlier)], at["prefix_len"]) if earlier else []
        found[phase] = {"probe": at.name, "facts": facts} | _texts(at)
    return found


def _records(run: Run, kinds: Mapping[str, str], kind: str) -> Phases:
    """Return the records of the first probe of a class by phase."""
    name = next((name for name, other in kinds.items() if other == kind), None)
    records = run.records(name) if name else []
    return {record["phase"]: Snapshot(run, name or "", record) for record in records}


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


def _kl_facts(at: Snapshot, start: int) -> list[dict[str, Any]]:
    n, names = at["sequences"]["exact"], at.get("slots")
    names = names or [str(i) for i in range(len(at["kl"]))]
    return [_fact(f"mean KL in nats, n = {n}", at, names, at["kl"])]


def _value_facts(at: Snapshot, start: int) -> list[dict[str, Any]]:
    names, against = at.get("slots"), at.get("r2_against")
    if not names or not against:
        return []
    label = f"correlation of value and {against} after it"
    names = names[start:]
    facts = [_fact(label, at, names, (at.get("head_correlation") or [])[start:])]
    r2, defined = at.get("r2") or [], at.get("defined") or []
    for site, row, is_defined in zip(at["sites"], r2, defined, strict=False):
        values = [x if known else None for x, known in zip(row, is_defined, strict=True)][start:]
        facts.append(_fact(f"R2 of {against} at {short_site(site)} after it", at, names, values))
    return facts


def _fact(label: str, at: Snapshot, names: list[str], values: list[Any]) -> dict[str, Any]:
    return {"label": label, "phase": at.record["phase"], "names": names, "values": values}
