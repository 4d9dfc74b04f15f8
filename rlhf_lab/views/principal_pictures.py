"""Pictures of OffPrincipal: shares of each change in the leading directions, beside chance."""

from collections.abc import Sequence
from typing import Any

from rlhf_lab.probes import Run
from rlhf_lab.views import html
from rlhf_lab.views.picture import Picture
from rlhf_lab.views.plots import bars, curves

SHOWN_MATRICES = 24
HEAD_PRODUCTS = (" OV", " QK")


def off_principal_parts(
    run: Run, name: str, records: Sequence[dict[str, Any]]
) -> list[Picture | str]:
    """Of the last record: shares beside chance, of matrices and of heads; then over phases."""
    last = records[-1]
    moved = [row for row in last["rows"] if row["share"] is not None]
    if not moved:
        return [f"<p>No weight has moved by phase {last['phase']}.</p>"]
    n = run.tensors(name, last["phase"])["draws"].shape[1]
    parts: list[Picture | str] = []
    for kind, of_heads in (("matrices", False), ("heads", True)):
        rows = [row for row in moved if row["name"].endswith(HEAD_PRODUCTS) == of_heads]
        shown = sorted(rows, key=lambda row: -row["norm"])[:SHOWN_MATRICES]
        rows = [row for row in rows if row in shown]
        if rows:
            parts.append(_bars(rows, f"phase {last['phase']}: {kind}, chance of n = {n} draws"))
    keys = ["name", "rows", "cols", "k", "norm", "own", "left", "right", "share"]
    keys += ["chance", "low", "high", "times"]
    parts.append(html.table(keys, [[row[key] for key in keys] for row in last["rows"]]))
    drawn = run.tensors(name, last["phase"])["draws"]
    at = [i for i, row in enumerate(last["rows"]) if row["share"] is not None]
    beaten = sum(last["rows"][i]["share"] > drawn[i].max().item() for i in at)
    parts.append(
        f"<p>{beaten} of {len(at)} shares are above all {n} random changes, whose mean is "
        f"{drawn[at].mean().item():.4g} over all of them. Own: how much of the weight itself lies "
        "in the same directions.</p>"
    )
    phases = [record["phase"] for record in records]
    labels = {"share": "of all matrices' change", "chance": "of chance"}
    series = {label: (phases, [r[key] for r in records]) for key, label in labels.items()}
    return [*parts, curves(series, "share of energy in the leading directions")]


def _bars(rows: Sequence[dict[str, Any]], title: str) -> Picture:
    """Shares beside chance, whose range is that of its draws."""
    series = {key: [row[key] for row in rows] for key in ("share", "chance")}
    ends = {"chance": ([row["low"] for row in rows], [row["high"] for row in rows])}
    return bars([row["name"] for row in rows], series, title, "share of energy", whiskers=ends)
