"""Pictures of records of probes that split a change by component, neuron or weight."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from rlhf_lab.views.intervals import bracketed
from rlhf_lab.views.pictures import Curves
from rlhf_lab.views.plots import heatmaps
from rlhf_lab.views.probe_curves import Pictures, row_ends, shift_words
from rlhf_lab.views.records import (
    Snapshot,
    matrix,
    record_bars,
    record_table,
    row_table,
    slots,
)


def _head_causes(at: Snapshot) -> Pictures:
    causes = {"pattern (QK)": "qk", "values (OV)": "ov", "W_O": "wo"}
    title = f"change of the shift by head and cause, n = {at['n']}"
    yield record_bars(at, title, "heads", causes, "logits", top=16)
    title = f"total variation of the pattern at {at['query']}"
    note = "A pattern that moves far need not change what is written."
    yield record_bars(at, title, "heads", {"total variation": "tv_here"}, note=note, top=16)
    by_key = sum(at.tensors[name] for name in causes.values()).mean(-1).flatten(0, 1)
    title = "change of the shift by head and key, all causes"
    yield matrix(at, title, by_key, at["heads"], at["keys"], "logits", "diverging")
    chosen = sorted(by_key.abs().sum(1).argsort(descending=True)[:16].tolist())
    tv = at.tensors["tv"].flatten(0, 1)
    patterns = {f"{at['heads'][i]}: {at['tv_here'][i]:.2f}": tv[i].tolist() for i in chosen}
    title = f"phase {at.phase}: half the mean difference of patterns, queries by keys"
    yield heatmaps(patterns, at["queries"], at["keys"], title)


def _transplant(at: Snapshot) -> Pictures:
    series = {"patched in": "put_in", "patched out": "taken_out", "Shapley": "shapley"}
    columns = {label: at.tensors[name].unbind(-1) for label, name in series.items()}
    title = f"reward by component, {at['gain']:+.3f} in all, n = {at['n']}"
    yield record_bars(at, title, "groups", columns, "reward")


def _kl_attribution(at: Snapshot) -> Pictures:
    whole = f"{at['kl']:.3g} nats per sequence"
    title = f"{whole}, through which output, n = {at['n']}"
    yield record_bars(at, title, "components", "output", "nats")
    title = f"{whole}, by whose weights, n = {at['n']}"
    note = (
        "A component's output includes what earlier components sent it; its weights include "
        "their effect through later components."
    )
    yield record_bars(at, title, "groups", "weights", "nats", note)
    rows = at.tensors["by_position"]
    title, cols = "KL through outputs, by the next token", slots(at, rows.shape[1])
    yield matrix(at, title, rows, at["components"], cols, "nats", "diverging")


def _logit_shift(at: Snapshot) -> Pictures:
    tensors = at.tensors
    series = {"shift": (at["shift"], *row_ends(tensors["shift"]))}
    sums = [("all", at["measured_shift"], tensors["measured"][None])]
    for field, label in CAUSES.items():
        if field in at.record:
            series[label] = (at[field], *row_ends(tensors[field]))
            sums.append((label, sum(at[field]), tensors[field].sum(0, keepdim=True)))
    parts = []
    for label, value, rows in sums:
        (low,), (high,) = row_ends(rows)
        parts.append(f"{label} {bracketed(value, low, high)}")
    title = f"shift of {shift_words(at)} by component, n = {tensors['shift'].shape[-1]}"
    yield record_bars(at, title, "components", series, "logits", f"Sums: {', '.join(parts)}.")
    before = tensors["reference"]
    ends = {"reference": row_ends(before), "policy": row_ends(before + tensors["shift"])}
    columns = {name: (at[name], *pair) for name, pair in ends.items()}
    yield record_bars(at, "logit difference by component", "components", columns, "logits")


CAUSES = {
    "own_weights": "own weights",
    "inherited": "inherited from earlier components",
    "scale": "the scale of the norm",
    "read_out": "unembedding",
}


def _words_moved(at: Snapshot) -> Pictures:
    title = f"words that moved together, n = {at['n']}"
    note = "Mass: probability per text. Shift and part: logits at the first slot."
    yield row_table(at, title, "contrasts", note=note)
    title = f"shift of {at.get('first')} by component"
    yield record_bars(at, title, "components", "parts", "logits", top=16)
    yield row_table(at, "words by probability won", "word_table")


def _neurons(at: Snapshot) -> Pictures:
    contribution = at.tensors["neuron_contribution"]
    part = sum(map(abs, at["contribution"])) / (contribution.abs().sum().item() or 1.0)
    note = f"{len(at['neurons'])} neurons have {part:.0%} of the sizes of all contributions."
    series, title = "contribution by_activation", f"shift by neuron, n = {at['n']}"
    yield record_bars(at, title, "neurons", series, "logits", note)
    groups = [f"{g} ({n})" for g, n in zip(at["groups"], at["group_size"], strict=True)]
    yield record_bars(
        at, "shift by group of neurons", groups, {"contribution": "group_contribution"}, "logits"
    )
    layers = [f"L{i} mlp" for i in range(len(at["mlp"]))]
    series = {"its neurons": contribution.sum(1), "b_out": "b_out", "both": "mlp"}
    yield record_bars(at, "shift by MLP", layers, series, "logits")
    active = [
        ", ".join(f"{word!r} {x:.3g}" for word, x in zip(*pair, strict=True))
        for pair in zip(at["tokens"], at["token_activations"], strict=True)
    ]
    names = "contribution by_activation activation activation_shift write group".split()
    columns = {name.replace("_", " "): name for name in ("neurons", *names)}
    yield record_table(at, "neurons", columns | {"most active at": active})


def _weight_changes(at: Snapshot) -> Pictures:
    yield row_table(at, "the largest changes of weights", "rows", "norm", 16)
    rows = sorted(at["rows"], key=lambda row: -row["norm"])[:6]
    series = {row["name"]: (list(range(len(row["s"]))), row["s"]) for row in rows}
    title = f"phase {at.phase}: singular values of the largest changes"
    yield Curves(series, title, "singular value", x_label="direction, from 0") if rows else None


COMPONENT_VIEWS: Mapping[str, Callable[[Snapshot], Pictures]] = MappingProxyType(
    {
        "AttentionDrift": _head_causes,
        "ComponentTransplant": _transplant,
        "KLAttribution": _kl_attribution,
        "LogitShift": _logit_shift,
        "WordsMoved": _words_moved,
        "NeuronRank": _neurons,
        "WeightDelta": _weight_changes,
    }
)
