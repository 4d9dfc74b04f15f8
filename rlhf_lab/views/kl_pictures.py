"""Pictures of the KL by position: exact, by its estimators, and what each position tells."""

from collections.abc import Sequence
from typing import Any

from rlhf_lab.probes import Run
from rlhf_lab.views.picture import Picture
from rlhf_lab.views.plots import Ends, bars, heatmap

SHOWN_TOKENS = 60
ESTIMATORS = ("k1", "k2", "k3")
INFORMATION_NOTE = (
    "<p>I_t, the information of a position about the reward, is the mean square of the step that "
    "its token makes in the exact value, in units of the reward squared. Over all positions it "
    "sums to the variance of the reward.</p>"
)


def kl_by_position_parts(
    run: Run, name: str, records: Sequence[dict[str, Any]]
) -> list[Picture | str]:
    """KL by position at every recorded phase; in the last, the estimators and their spread."""
    last = records[-1]
    n = min(len(last["kl"]), SHOWN_TOKENS)
    slots = last.get("slots", [str(t) for t in range(n)])[:n]
    phases = [f"phase {record['phase']}" for record in records]
    grid = [record["kl"][:n] for record in records]
    if not any(map(any, grid)):
        return [f"<p>The KL is 0 at every position of {', '.join(phases)}.</p>"]
    counts = last.get("sequences")
    of = f", n = {counts['exact']}" if counts else ""
    parts: list[Picture | str] = []
    parts.append(heatmap(grid, phases, slots, f"KL from the reference, nats per token{of}"))
    names = {"kl": f"exact{of}"}
    names |= {
        kind: kind + (f", n = {counts['estimated']}" if counts else "") for kind in ESTIMATORS
    }
    fields = {"kl": "kl"} | {kind: f"{kind}_mean" for kind in ESTIMATORS}
    found = {label: last[fields[kind]][:n] for kind, label in names.items()}
    whiskers = {
        label: _ends(last, kind, n) for kind, label in names.items() if f"{kind}_low" in last
    }
    title = f"phase {last['phase']}: exact KL and its estimators, nats per token"
    parts.append(bars(slots, found, title, whiskers=whiskers))
    if whiskers:
        parts.append(_note(last))
    spread = {kind: [x**0.5 for x in last[f"{kind}_var"][:n]] for kind in ESTIMATORS}
    title = f"phase {last['phase']}: standard deviation of the estimators, nats per token"
    parts.append(bars(slots, spread, title))
    if "information" in last:
        title = "I_t: exact variance of the reward that each position explains"
        parts.append(bars(slots, {"I_t": last["information"][:n]}, title, "reward^2"))
        parts.append(INFORMATION_NOTE)
    return parts


def _ends(record: dict[str, Any], kind: str, n: int) -> Ends:
    return record[f"{kind}_low"][:n], record[f"{kind}_high"][:n]


def _note(record: dict[str, Any]) -> str:
    """What whiskers are, and where there are fewer sequences than in all."""
    counts = record["sequences"]
    fewest = min(record["tokens_at"])
    left = f", of which {fewest} have a token at every position" * (fewest < counts["exact"])
    return (
        f"<p>Whiskers: 95 %, bootstrap over the {counts['exact']} sequences{left}; the estimators "
        f"saw the first {counts['estimated']} of them.</p>"
    )
