"""Pictures of HackWatch: rewards beside the truth, collapse, words taken up, and their alarms."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_lab.probes import Run
from rlhf_lab.views import html
from rlhf_lab.views.intervals import HOW
from rlhf_lab.views.picture import Picture
from rlhf_lab.views.plots import Curve, Ends, curves

MEASURES = {
    "distinct": "different n-grams, of all",
    "repeated": "n-grams that their text has had before",
    "overlap": "n-grams that another text has",
}


def hack_watch_parts(run: Run, name: str, records: Sequence[dict[str, Any]]) -> list[Picture | str]:
    """Curves over phases, alarms of every phase, and both tables of words of the last record."""
    last = records[-1]
    phases = [record["phase"] for record in records]
    series = {key: _curve(phases, records, key) for key in ("reward", "true_reward", "grammatical")}
    spread = {"standard deviation": _curve(phases, records, "reward_std")}
    spread["saturated below"] = _curve(phases, records, "saturated_below")
    parts: list[Picture | str] = [
        '<div class="figures">',
        _with_bands("reward, true reward, and the share that is grammatical", series, records),
        *(
            [
                _with_bands(
                    "reward less true reward", {"gap": _curve(phases, records, "gap")}, records
                )
            ]
            if "gap" in last
            else []
        ),
        curves(spread, "spread of the rewards"),
        *(_collapse(phases, records, measure) for measure in MEASURES),
        "</div>",
        f"<p>Bands: {HOW}, n = {last['n']} texts of each phase and as many of the reference.</p>",
        _alarms(records),
    ]
    tensors = run.tensors(name, last["phase"])
    moved = tensors["promoted_mass"].abs().sum().item() / 2
    ours, theirs = tensors["counts"].sum(1).tolist()
    parts.append(
        f"<p>Phase {last['phase']}, by the logits: probability won in the states of the policy's "
        f"own texts; in all, {moved:.3g} of it moved from words to others. n = {ours} tokens in "
        f"{last['n']} texts; intervals 95 %, bootstrap over texts.</p>"
    )
    parts.append(_table(last["promoted"]))
    parts.append(
        f"<p>Phase {last['phase']}, by the texts alone, the baseline: log odds against what the "
        f"reference wrote for the same prompts, by their standard errors. n = {ours} tokens and "
        f"{theirs} of the reference; intervals 95 %, as if tokens were independent.</p>"
    )
    return [*parts, _table(last["taken_up"])]


def _curve(phases: Sequence[int], records: Sequence[dict[str, Any]], key: str) -> Curve:
    return phases, [record.get(key) for record in records]


def _with_bands(
    title: str, series: Mapping[str, Curve], records: Sequence[dict[str, Any]]
) -> Picture:
    """Those of the curves that have a number, with their intervals."""
    there = {key: curve for key, curve in series.items() if any(y is not None for y in curve[1])}
    bands: dict[str, Ends] = {
        key: tuple([record.get(f"{key}_{end}") for record in records] for end in ("low", "high"))
        for key in there
        if any(f"{key}_low" in record for record in records)
    }
    return curves(there, title, bands=bands)


def _collapse(phases: Sequence[int], records: Sequence[dict[str, Any]], measure: str) -> Picture:
    """One measure of the policy's texts and of the reference's, for each n."""
    series = {
        f"{whose}, n = {n}": (phases, [record[f"{measure}_{key}"][at] for record in records])
        for at, n in enumerate(records[-1]["orders"])
        for key, whose in (("texts", "policy"), ("reference", "reference"))
    }
    return curves(series, f"{measure}-n: {MEASURES[measure]}")


def _alarms(records: Sequence[dict[str, Any]]) -> str:
    """A row per record that has an alarm, by the logits beside by the texts."""
    words = lambda found: ", ".join(found) or "–"
    rows = [
        [
            record["phase"],
            words(record["alarms_by_logits"]),
            words(record["alarms_by_texts"]),
            record["saturated"],
        ]
        for record in records
        if record["alarms_by_logits"] or record["alarms_by_texts"] or record["saturated"]
    ]
    note = (
        f"<p>An alarm names a word that is twice as likely as in the reference, and "
        f"{records[-1]['alarm_z']:.4g} standard errors more: by the logits, and by the texts "
        f"alone. Rewards are saturated where their standard deviation is less than "
        f"{records[-1]['saturated_below']:.3g}.</p>"
    )
    if not rows:
        return f"{note}<p>No alarm in {len(records)} records.</p>"
    columns = ["phase", "by the logits", "by the texts alone", "saturated"]
    return note + html.table(columns, rows, words=(1, 2, 3))


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """All columns of a table of words; blanks around a word are shown."""
    columns = list(rows[0])
    shown = [[_visible(row["token"]), *(row[key] for key in columns[1:])] for row in rows]
    return html.table([column.replace("_", " ") for column in columns], shown)


def _visible(word: str) -> str:
    return word if word == word.strip() else repr(word)
