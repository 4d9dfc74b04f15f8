"""Pictures that the table of pictures cannot declare: over phases, and of single records."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from types import MappingProxyType

from rlhf_lab.probes.run_health import FREE_KL
from rlhf_lab.views.pictures import Curves, Matrix, Table
from rlhf_lab.views.plots import heatmaps
from rlhf_lab.views.records import (
    Drawn,
    Snapshot,
    cell,
    curves_over,
    field_bars,
    short_site,
    slots,
    strip,
    table_over,
)

Snapshots = Sequence[Snapshot]
Pictures = Iterable[Drawn | None]
GRADIENT = "objective per unit of weight"
REPETITION = {
    "distinct": "different n-grams",
    "repeated": "n-grams that their text has had before",
    "overlap": "n-grams that another text has",
}
AT_A_CELL = (
    "accuracy accuracy_frozen accuracy_lda accuracy_ablated accuracy_erased accuracy_shuffled "
    "auc cosine_with_reference split_half_cosine positive_projection "
    "negative_projection"
)
# numbers of tokens as colors, and their units if they have one
STRIPS = dict.fromkeys("advantage true_advantage value true_value".split(), "") | {"kl": " in nats"}
STRIPS |= dict.fromkeys(("true_advantage", "true_value"), " in units of the reward")
# columns of a ledger, and their digits
LEDGER = dict.fromkeys("old_logprob logprob ratio advantage whitened return value kl".split(), 3)
LEDGER |= {"entropy": 3, "surrogate": 5, "value_loss": 5, "share": 5}


def _optimum(records: Snapshots) -> Pictures:
    """Explain the exact optimum and the phases without one."""
    if not any("optimal_reward" in at.record for at in records):
        return
    missing = [str(at.phase) for at in records if at.get("optimal_reward") is None]
    yield (
        "<p>The exact optimum is the best policy at that phase's beta_eff, which is kl_coef times "
        "the standard deviations that advantages and rewards were divided by."
        + f" It has no point in phase {', '.join(missing)}: beta_eff was not above {FREE_KL:g} "
        "there." * bool(missing) + "</p>"
    )


def _kl_map(records: Snapshots) -> Pictures:
    cols = max((at.get("slots") or () for at in records), key=len)
    title = f"KL from the reference, n = {records[-1]['sequences']['exact']}"
    phases = [f"phase {at.phase}" for at in records]
    yield Matrix([at["kl"] for at in records], phases, cols, title, "nats per token")


def _gradient_norms(records: Snapshots) -> Pictures:
    terms = enumerate(records[-1]["terms"])
    norm = lambda i: lambda at: at.tensors["norms"][i, -1].item()
    series = {term.replace("_", " "): norm(i) for i, term in terms}
    yield curves_over(records, "norm of each term's whole gradient", series, GRADIENT)


def _repetition(records: Snapshots) -> Pictures:
    for name, title in REPETITION.items():
        series = {
            f"{label}, n = {n}": cell(f"{name}_{key}", i)
            for i, n in enumerate(records[-1]["orders"])
            for key, label in (("texts", "policy"), ("reference", "reference"))
        }
        yield curves_over(records, f"{name}-n: {title}", series, "fraction")
    by = ("alarms_by_logits", "alarms_by_texts")
    rows = [[at.phase, *(", ".join(at[x]) or "–" for x in by)] for at in records]
    note = (
        "An alarm is a word that is twice as likely as in the reference, and "
        f"{records[-1]['alarm_z']:.4g} standard errors more."
    )
    rows = [row for row in rows if row[1:] != ["–", "–"]]
    columns = ["phase", "by the logits", "by the texts alone"]
    yield Table(columns, rows, "alarms", note) if rows else "<p>No alarm.</p>"


def _drift(records: Snapshots) -> Pictures:
    """Return all fields at the most accurate cell of the first record, of equal ones the last."""
    first = records[0]
    cells = [(x, i, j) for i, row in enumerate(first["accuracy"]) for j, x in enumerate(row)]
    _, i, j = max(cells)
    where, counts = f"{short_site(first['sites'][i])}, {slots(first, j + 1)[j]}", first["sequences"]
    yield (
        f"<p>At {escape(where)}, the most accurate of {len(cells)} cells in the first record; "
        f"fitted to {counts['fitted']} sequences, evaluated on {counts['held']} others.</p>"
    )
    series = {name.replace("_", " "): cell(name, i, j) for name in AT_A_CELL.split()}
    yield table_over(records, "at this cell", series)
    if len(records) > 1:
        for name in ("accuracy", "cosine_with_reference"):
            label = name.replace("_", " ")
            yield curves_over(records, f"{label} of the direction", {label: series[label]})


def _frozen_curves(records: Snapshots) -> Pictures:
    """Return the frozen and the refitted probe at the most accurate site of the first record."""
    first = records[0]
    pairs = zip(first["accuracy_frozen"], first["size"], strict=True)
    known = [x if size > 1e-3 else 0.0 for x, size in pairs]
    i = max(range(len(known)), key=known.__getitem__)
    counts, where = first["sequences"], first.get("slot") or f"position {first['position']}"
    yield (
        f"<p>At {first['sites'][i]}, {where}, the most accurate of {len(known)} sites in the first "
        f"record; fitted to {counts['fitted']} sequences, counted on {counts['held']} others, of "
        f"which {first['positive']:.0%} are positive.</p>"
    )
    accuracies = {
        "frozen in phase 0": cell("accuracy_frozen", i),
        "refitted": lambda at: at["accuracy_frozen"][i] - at["gap"][i],
        "shuffled labels": cell("accuracy_control", i),
        "Bayes' rule": cell("bayes_accuracy", 0),
    }
    yield curves_over(records, "accuracy of linear probes", accuracies)
    note = "With halves below 0.8, a turn of the direction cannot be distinguished from noise."
    cosines = {"of both directions": cell("cosine", i), "of two halves": cell("split_half", i)}
    yield curves_over(records, "cosine", cosines, note=note)


def _gradient_bars(at: Snapshot) -> Pictures:
    pairs = zip(at["terms"], at["norms"], strict=True)
    series = {term.replace("_", " "): (lambda at, norms=norms: norms) for term, norms in pairs}
    title = "norm of each term's gradient, step {number} of {steps}"
    yield field_bars(at, title, at["groups"], series, GRADIENT)


def _patterns(at: Snapshot) -> Pictures:
    """Return the change of the patterns of the 16 heads whose patterns moved most."""
    chosen = sorted(range(len(at["heads"])), key=lambda i: -at["tv_here"][i])[:16]
    tv = at.tensors["tv"].flatten(0, 1)
    grids = {f"{at['heads'][i]}: {at['tv_here'][i]:.2f}": tv[i].tolist() for i in sorted(chosen)}
    title = at.title("half the mean difference of patterns, queries by keys")
    yield heatmaps(grids, at["queries"], at["keys"], title)


def _ledger(at: Snapshot) -> Pictures:
    """Return every column of the tokens of the sequence that adds most to the objective."""
    tensors, share = at.tensors, at.tensors["share"]
    i = share.abs().sum(1).argmax().item()
    texts, rows = at["tokens"][i][at["prefix_len"] :], []
    for t in tensors["mask"][i].nonzero().flatten().tolist():
        cells = [f"{tensors[name][i, t] + 0.0:z.{n}f}" for name, n in LEDGER.items()]
        rows.append([texts[t].strip(), "yes" if tensors["clipped"][i, t] else "no", *cells])
    note = (
        f"Sequence {i} adds {share[i].sum():.6f}; all {int(tensors['mask'].sum())} tokens of the "
        f"minibatch together give the objective, {at['objective']:.6f}. A large advantage need "
        "not be a large gradient: a token of log-probability 0 cannot become more likely."
    )
    columns = ["token", "clip binds", *(name.replace("_", " ") for name in LEDGER)]
    yield Table(columns, rows, note=note)


def _texts(at: Snapshot) -> Pictures:
    for name, unit in STRIPS.items():
        label = name.replace("true_", "exact ").replace("_", " ")
        kind = "sequential" if name in ("kl", "true_value") else "diverging"
        mask = "truth_mask" if name.startswith("true_") else "mask"
        yield strip(at, label + unit, name, label, kind, mask)


def _singular_values(at: Snapshot) -> Pictures:
    rows = sorted(at["rows"], key=lambda row: -row["norm"])[:6]
    series = {row["name"]: (list(range(len(row["s"]))), row["s"]) for row in rows}
    title = at.title("singular values of the largest changes")
    yield Curves(series, title, "singular value", x_label="direction, from 0") if rows else None


def _no_words(at: Snapshot) -> Pictures:
    yield None if at.get("contrasts") else "<p>No word has moved beyond noise.</p>"


OVER_PHASES: Mapping[str, Callable[[Snapshots], Pictures]] = MappingProxyType(
    {
        "RunHealth": _optimum,
        "KLByPosition": _kl_map,
        "GradTerms": _gradient_norms,
        "HackWatch": _repetition,
        "Direction": _drift,
        "FrozenProbe": _frozen_curves,
    }
)
OF_RECORD: Mapping[str, Callable[[Snapshot], Pictures]] = MappingProxyType(
    {
        "GradTerms": _gradient_bars,
        "AttentionDrift": _patterns,
        "StepLedger": _ledger,
        "TextHeatmap": _texts,
        "WeightDelta": _singular_values,
        "WordsMoved": _no_words,
    }
)
