"""Pictures of a frozen probe: both readers over phases, the turn, the shift, and steering."""

from collections.abc import Sequence
from html import escape
from typing import Any

from rlhf_lab.probes import Run
from rlhf_lab.views import html
from rlhf_lab.views.intervals import HOW, bracketed
from rlhf_lab.views.picture import Picture
from rlhf_lab.views.plots import Ends, curves

CREDIBLE_FLOOR = 0.8
"""Of the cosine of two halves: below it a turn of the axis cannot be told from noise."""
_Records = Sequence[dict[str, Any]]


def frozen_probe_parts(run: Run, name: str, records: _Records) -> list[Picture | str]:
    """Both readers, the turn and the shift at the site that tells most in the first record."""
    first, last = records[0], records[-1]
    sites = first["sites"]
    told = [
        right if size > 1e-3 else 0.0
        for right, size in zip(first["accuracy_frozen"], first["size"], strict=True)
    ]
    at = max(range(len(sites)), key=told.__getitem__)
    counts, where = first["sequences"], first.get("slot", f"position {first['position']}")
    note = (
        f"<p>At {escape(sites[at])}, {escape(where)}, the most accurate of {len(sites)} sites in "
        f"the first record; fitted to {counts['fitted']} sequences, counted on {counts['held']} "
        f"others, of which {first['positive']:.0%} are positive (bands: {HOW}).</p>"
    )
    pictures = [
        _readers(records, at),
        _shares(records, at),
        _turn(records, at),
        _shift(records, at),
    ]
    parts: list[Picture | str] = [note, '<div class="figures">', *filter(None, pictures), "</div>"]
    parts.append(_table(last))
    return [*parts, *(_steering(last) if "alphas" in last else [])]


def _ends_of(records: _Records, field: str, at: int) -> Ends | None:
    """The interval of a field at one site, over phases; None in records without."""
    if any(f"{field}_low" not in record for record in records):
        return None
    low, high = ([r[f"{field}_{end}"][at] for r in records] for end in ("low", "high"))
    return low, high


def _curve(records: _Records, fields: dict[str, tuple[str, int]], title: str) -> Picture:
    """Fields at a site each, over phases, with their bands."""
    phases, series, bands = [record["phase"] for record in records], {}, {}
    for label, (field, at) in fields.items():
        series[label] = phases, [record[field][at] for record in records]
        if (ends := _ends_of(records, field, at)) is not None:
            bands[label] = ends
    return curves(series, title, bands=bands)


def _readers(records: _Records, at: int) -> Picture:
    """The frozen reader beside one fitted anew, which is its accuracy less the gap."""
    shown = [
        record
        | {"anew": [a - g for a, g in zip(record["accuracy_frozen"], record["gap"], strict=True)]}
        for record in records
    ]
    fields = {"frozen in phase 0": ("accuracy_frozen", at), "fitted anew": ("anew", at)}
    fields["shuffled labels"] = ("accuracy_control", at)
    if all("bayes_accuracy" in record for record in records):
        fields["Bayes' rule"] = ("bayes_accuracy", 0)
    return _curve(shown, fields, "accuracy of readers")


def _shares(records: _Records, at: int) -> Picture:
    fields = {"frozen less anew": ("gap", at), "called positive": ("called", at)}
    return _curve(records, fields, "gap of the readers, and what is called positive")


def _turn(records: _Records, at: int) -> Picture | None:
    """The cosine beside its floor, where the floor is high enough to say anything."""
    if min(record["split_half"][at] for record in records) < CREDIBLE_FLOOR:
        return None
    fields = {"of both directions": ("cosine", at), "of two halves (floor)": ("split_half", at)}
    return _curve(records, fields, "cosine")


def _shift(records: _Records, at: int) -> Picture:
    size = records[0]["size"][at]
    title = f"shift along the frozen direction (classes are {size:.2f} apart)"
    return _curve(records, {"shift": ("shift", at)}, title)


def _table(record: dict[str, Any]) -> str:
    """All sites in one phase."""
    fields = ("accuracy_frozen", "gap", "called", "shift", "cosine")
    rows = [
        [
            site,
            *(_cell(record, field, i) for field in fields),
            record["split_half"][i],
            record["moved_cosine"][i],
            record["accuracy_control"][i],
            record["size"][i],
        ]
        for i, site in enumerate(record["sites"])
    ]
    columns = ["site", *(field.replace("_", " ") for field in fields), "floor of the cosine"]
    columns += ["cosine of the movement", "shuffled labels", "classes apart"]
    note = (
        f"<p>Phase {record['phase']}; a cosine below {CREDIBLE_FLOOR} in two halves is no news.</p>"
    )
    return html.table(columns, rows) + note


def _cell(record: dict[str, Any], field: str, i: int) -> str:
    ends = (record.get(f"{field}_{end}", [None] * (i + 1))[i] for end in ("low", "high"))
    return bracketed(record[field][i], *ends)


def _steering(record: dict[str, Any]) -> list[Picture | str]:
    """What continuations earn where the direction is added, beside random directions."""
    order = sorted(range(len(record["alphas"])), key=record["alphas"].__getitem__)
    alphas = [record["alphas"][i] for i in order]
    pictures: list[Picture | str] = []
    for name in ("true_reward", "grammatical", "surprise"):
        series, bands = {}, {}
        for label, field, x, places in (
            ("frozen direction", name, alphas, order),
            (
                "random directions",
                f"{name}_random",
                record["random_alphas"],
                range(len(record["random_alphas"])),
            ),
        ):
            series[label] = x, [record[field][i] for i in places]
            if f"{field}_low" in record:
                bands[label] = tuple(
                    [record[f"{field}_{end}"][i] for i in places] for end in ("low", "high")
                )
        title = f"phase {record['phase']}: {name}, steered; n = {record['sequences']['steered']}"
        pictures.append(curves(series, title, "alpha, in differences of means", bands=bands))
    note = (
        f"<p>Added at {escape(record['steered_at'])} and this slot, to prefixes that were held "
        "out; every arm has the same noise.</p>"
    )
    return [note, '<div class="figures">', *pictures, "</div>"]
