"""Pictures of attention drift: how far each head's pattern moved, and by what it writes more."""

from collections.abc import Sequence
from html import escape
from typing import Any

from rlhf_lab.probes import Run
from rlhf_lab.views.picture import Picture
from rlhf_lab.views.plots import bars, heatmaps

SHOWN_HEADS = 16
CAUSES_OF_HEADS = {"qk": "pattern (QK)", "ov": "values (OV)", "wo": "W_O"}


def attention_drift_parts(
    run: Run, name: str, records: Sequence[dict[str, Any]]
) -> list[Picture | str]:
    """Of the last record: causes by head, keys of the heads that moved most, and patterns."""
    last = records[-1]
    tensors = run.tensors(name, last["phase"])
    if not tensors["own"].any():
        return [f"<p>No head has moved by phase {last['phase']}.</p>"]
    sizes = sum(tensors[cause] for cause in CAUSES_OF_HEADS).abs().sum(2).mean(-1).flatten()
    chosen = sorted(sizes.argsort(descending=True)[:SHOWN_HEADS].tolist())
    heads = [last["heads"][i] for i in chosen]
    title = f"phase {last['phase']}: what heads add to the shift, by cause, n = {last['n']}"
    series = {
        f"{label}, {sum(last[cause]):+.2f} in all": [last[cause][i] for i in chosen]
        for cause, label in CAUSES_OF_HEADS.items()
    }
    ends = {
        label: tuple([last[f"{cause}_{end}"][i] for i in chosen] for end in ("low", "high"))
        for label, cause in zip(series, CAUSES_OF_HEADS, strict=True)
        if f"{cause}_low" in last
    }
    parts: list[Picture | str] = [bars(heads, series, title, whiskers=ends)]
    if len(heads) < len(sizes):
        parts.append(f"<p>The {len(heads)} of {len(sizes)} heads that moved most.</p>")
    parts += _keys(last, tensors, sizes)
    patterns = {
        f"{last['heads'][i]}: {last['tv_here'][i]:.2f}": tensors["tv"].flatten(0, 1)[i].tolist()
        for i in chosen
    }
    title = "half the mean difference of patterns, queries by keys"
    parts.append(heatmaps(patterns, last["queries"], last["keys"], title))
    return [
        *parts,
        f"<p>Beside each head, the total variation of its pattern at {escape(last['query'])}, "
        "where causes are taken: a pattern that moves far need not change what is written.</p>",
    ]


def _keys(last: dict[str, Any], tensors: dict[str, Any], sizes: Any) -> list[Picture]:
    """Causes by key of the two heads that moved most."""
    found = []
    for i in sizes.argsort(descending=True)[:2].tolist():
        means = {cause: tensors[cause].flatten(0, 1)[i].mean(-1) for cause in CAUSES_OF_HEADS}
        there = sum(x.abs() for x in means.values()) > 0
        keys = [key for key, is_there in zip(last["keys"], there.tolist(), strict=True) if is_there]
        series = {label: means[cause][there].tolist() for cause, label in CAUSES_OF_HEADS.items()}
        if keys:
            found.append(bars(keys, series, f"{last['heads'][i]}: causes by key"))
    return found
