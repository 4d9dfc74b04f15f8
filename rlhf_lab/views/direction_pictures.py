"""Pictures of a direction's drift: readers, cosines and projections over phases, in one cell."""

from collections.abc import Sequence
from html import escape
from typing import Any

from rlhf_lab.views.intervals import HOW
from rlhf_lab.views.picture import Picture
from rlhf_lab.views.plots import Curve, Ends, curves

DIRECTION_CURVES = (
    ("accuracy of readers", "fitted anew", "accuracy"),
    ("accuracy of readers", "the reference's", "accuracy_frozen"),
    ("accuracy of readers", "Fisher's discriminant", "accuracy_lda"),
    ("accuracy of controls", "direction ablated", "accuracy_ablated"),
    ("accuracy of controls", "erased by LEACE", "accuracy_erased"),
    ("accuracy of controls", "shuffled labels", "accuracy_shuffled"),
    ("accuracy of controls", "random direction", "accuracy_random"),
    ("AUC", "fitted anew", "auc"),
    ("cosine", "with the reference's", "cosine_with_reference"),
    ("cosine", "of two halves (floor)", "split_half_cosine"),
    ("projection on the reference's direction", "positive", "positive_projection"),
    ("projection on the reference's direction", "negative", "negative_projection"),
)


def drift_parts(records: Sequence[dict[str, Any]], sites: Sequence[str]) -> list[str | Picture]:
    """All that is stored of one cell, over phases: where the first record is most accurate.

    Args:
        sites: their names on the page.
    """
    first, cells = records[0], len(records[0]["accuracy"]) * len(records[0]["accuracy"][0])
    accuracies = {
        (site, pos): x for site, row in enumerate(first["accuracy"]) for pos, x in enumerate(row)
    }
    site, pos = max(accuracies, key=accuracies.get)
    slots = first.get("slots", [str(t) for t in range(len(first["accuracy"][0]))])
    phases = [record["phase"] for record in records]
    groups: dict[str, dict[str, Curve]] = {}
    bands: dict[str, dict[str, Ends]] = {}
    for title, label, field in DIRECTION_CURVES:
        if all(field in record for record in records):
            found = [record[field][site][pos] for record in records]
            groups.setdefault(title, {})[label] = (phases, found)
            if all(f"{field}_low" in record for record in records):
                low, high = (
                    [record[f"{field}_{end}"][site][pos] for record in records]
                    for end in ("low", "high")
                )
                bands.setdefault(title, {})[label] = low, high
    where = f"{sites[site]}, {slots[pos]}"
    counts = first["sequences"]
    note = (
        f"<p>At {escape(where)}, the most accurate of {cells} cells in the first record; fitted to "
        f"{counts['fitted']} sequences, counted on {counts['held']} others (band: {HOW}).</p>"
    )
    pictures = [
        curves(series, title, bands=bands.get(title, {})) for title, series in groups.items()
    ]
    return [note, '<div class="figures">', *pictures, "</div>"]
