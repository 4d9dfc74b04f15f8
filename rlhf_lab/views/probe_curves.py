"""Pictures of the built-in probes over phases: which fields go to which picture."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from types import MappingProxyType

from torch import Tensor

from rlhf_lab.probes.run_health import FREE_KL
from rlhf_lab.views.intervals import (
    HOW,
    bracketed,
    interval_of_terms,
    mean_of_rows,
    sample_bands,
    whisker_ends,
)
from rlhf_lab.views.pictures import Ends, Matrix, Table
from rlhf_lab.views.records import Drawn, Snapshot, cell, curves_over, short_site, slots

NATS = "nats per token"
GRADIENT = "objective per unit of weight"
Pictures = Iterable[Drawn | None]
Snapshots = Sequence[Snapshot]


def row_ends(rows: Tensor) -> Ends:
    """Return the intervals of the means of rows over sequences."""
    return whisker_ends(mean_of_rows(rows))


def named_terms(at: Snapshot) -> list[str]:
    """Return the terms of the objective as labels."""
    return [term.replace("_", " ") for term in at["terms"]]


def _health_curves(records: Snapshots) -> Pictures:
    bands = sample_bands(records[-1].run)[0]
    note = f"Bands: {HOW}, n = {records[-1]['sequences']} of each phase. {optimum_note(records)}"
    for title, series, unit in HEALTH:
        yield curves_over(records, title, series, unit, note * (title == "reward"), bands)


HEALTH = (
    ("reward", "mean_reward true_reward optimal_reward", "reward"),
    ("KL from the reference", "kl_per_sequence optimal_kl_per_sequence", "nats per sequence"),
    ("learning", "explained_variance clip_fraction", "fraction"),
    ("norm of the gradient", "grad_norm", GRADIENT),
)


def optimum_note(records: Snapshots) -> str:
    """Explain the exact optimum and the phases without one."""
    if not any("optimal_reward" in at.record for at in records):
        return ""
    missing = [str(at.phase) for at in records if at.get("optimal_reward") is None]
    note = (
        f" It has no point in phase {', '.join(missing)}: beta_eff was not above {FREE_KL:g} there."
    )
    return (
        "The exact optimum is the best policy at that phase's beta_eff, which is kl_coef times the "
        f"standard deviations that advantages and rewards were divided by.{note * bool(missing)}"
    )


def _kl_map(records: Snapshots) -> Pictures:
    cols = max((at.get("slots") or () for at in records), key=len)
    title = f"KL from the reference, n = {records[-1]['sequences']['exact']}"
    phases = [f"phase {at.phase}" for at in records]
    yield Matrix([at["kl"] for at in records], phases, cols, title, NATS)


def _gradient_norms(records: Snapshots) -> Pictures:
    norm = lambda at, i: at.tensors["norms"][i, -1].item()
    terms = enumerate(named_terms(records[-1]))
    series = {term: lambda at, i=i: norm(at, i) for i, term in terms}
    yield curves_over(records, "norm of each term's whole gradient", series, GRADIENT)


def _step_rows(records: Snapshots) -> Pictures:
    """Return the terms of the objective in every recorded step, with their intervals."""
    args, rows = records[-1].run.args, []
    for at in records:
        interval = interval_of_terms(at.tensors, args.loss_aggregation == "token_mean")
        n = int(at.tensors["mask"].sum())
        weights = {"entropy_bonus": args.ent_coef / n, "kl_penalty": at["kl_coef"] / n}
        cells = []
        for term, *ends in zip(SIGNED_TERMS, *whisker_ends(interval), strict=True):
            ends = [None if x is None else weights.get(term, 1.0) * x for x in ends]
            cells.append(bracketed(at[term], *ends))
        rows.append(
            [at.phase, at["step"] + 1, interval.n, at["real_tokens"], *cells, at["kl_coef"]]
        )
    columns = ["phase", "step", "n", "tokens", *SIGNED_TERMS.values(), "KL coefficient"]
    yield Table(columns, rows, "terms of the objective", ())


SIGNED_TERMS = {
    "clipped_surrogate": "clipped surrogate",
    "value_loss": "− value loss",
    "entropy_bonus": "+ entropy bonus",
    "kl_penalty": "− KL penalty",
    "objective": "= objective",
}


def _hacking(records: Snapshots) -> Pictures:
    note = f"Bands: {HOW}, n = {records[-1]['n']} texts of each phase and of the reference."
    yield curves_over(records, "reward minus true reward", "reward true_reward gap", "reward", note)
    yield curves_over(records, "grammatical texts", "grammatical", "fraction")
    spread = {"standard deviation": "reward_std", "saturated below": "saturated_below"}
    yield curves_over(records, "spread of the rewards", spread, "reward")
    for name, title in REPETITION.items():
        series = {
            f"{label}, n = {n}": lambda at, i=i, field=f"{name}_{key}": at[field][i]
            for i, n in enumerate(records[-1]["orders"])
            for key, label in (("texts", "policy"), ("reference", "reference"))
        }
        yield curves_over(records, f"{name}-n: {title}", series, "fraction")
    words = lambda found: ", ".join(found) or "–"
    by = ("alarms_by_logits", "alarms_by_texts")
    rows = [[at.phase, *(words(at[x]) for x in by)] for at in records]
    note = (
        "An alarm is a word that is twice as likely as in the reference, and "
        f"{records[-1]['alarm_z']:.4g} standard errors more."
    )
    rows = [row for row in rows if row[1:] != ["–", "–"]]
    columns = ["phase", "by the logits", "by the texts alone"]
    yield Table(columns, rows, "alarms", (1, 2), note) if rows else "<p>No alarm.</p>"


REPETITION = {
    "distinct": "different n-grams",
    "repeated": "n-grams that their text has had before",
    "overlap": "n-grams that another text has",
}


def _drift(records: Snapshots) -> Pictures:
    """Return all fields at the most accurate cell of the first record, of equal ones the last."""
    first = records[0]
    cells = [(x, i, j) for i, row in enumerate(first["accuracy"]) for j, x in enumerate(row)]
    _, i, j = max(cells)
    where, counts = f"{short_site(first['sites'][i])}, {slots(first)[j]}", first["sequences"]
    yield (
        f"<p>At {escape(where)}, the most accurate of {len(cells)} cells in the first record; "
        f"fitted to {counts['fitted']} sequences, evaluated on {counts['held']} others.</p>"
    )
    for title, fields in DRIFT.items():
        series = {name.replace("_", " "): cell(name, i, j) for name in fields.split()}
        yield curves_over(records, title, series)


DRIFT = {
    "accuracy of linear probes": "accuracy accuracy_frozen accuracy_lda",
    "accuracy of controls": "accuracy_ablated accuracy_erased accuracy_shuffled",
    "AUC": "auc",
    "cosine": "cosine_with_reference split_half_cosine",
    "projection on the reference's direction": "positive_projection negative_projection",
}


def _frozen_curves(records: Snapshots) -> Pictures:
    """Return the frozen and the refitted probe at the most accurate site of the first record."""
    first = records[0]
    known = [
        x if size > 1e-3 else 0.0
        for x, size in zip(first["accuracy_frozen"], first["size"], strict=True)
    ]
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
    fractions = {"frozen minus refitted": cell("gap", i), "called positive": cell("called", i)}
    yield curves_over(
        records, "frozen probe minus refitted, and fraction called positive", fractions
    )
    title = f"shift along the frozen direction (classes are {first['size'][i]:.2f} apart)"
    yield curves_over(records, title, {"shift": cell("shift", i)})
    if min(at["split_half"][i] for at in records) >= 0.8:  # a lower floor hides any turn
        cosines = {"of both directions": cell("cosine", i)}
        cosines["of two halves (floor)"] = cell("split_half", i)
        yield curves_over(records, "cosine", cosines)


def _shift_curve(records: Snapshots) -> Pictures:
    ends = [row_ends(at.tensors["measured"][None]) for at in records]
    ends = {at.phase: (low[0], high[0]) for at, (low, high) in zip(records, ends, strict=True)}
    series, bands = {"shift": "measured_shift"}, {"measured_shift": ends}
    title = f"shift of {shift_words(records[-1])}"
    yield curves_over(records, title, series, "logits", bands=bands)


def shift_words(at: Snapshot) -> str:
    """Return the words whose logits are compared, of both sides."""
    probes = at.run.store.read_suite()["probes"]
    settings = next((probe for probe in probes if probe["name"] == at.name), {})
    word, other = settings.get("word", "word"), settings.get("other", "other")
    return f"logit({word} - {other})"


def _won_mass(records: Snapshots) -> Pictures:
    title = "probability that words won per text"
    yield curves_over(records, title, "moved_mass", "probability")


def _norm_curve(records: Snapshots) -> Pictures:
    yield curves_over(records, "distance of the weights from the reference", "total_norm")


OVER_PHASES: Mapping[str, Callable[[Snapshots], Pictures]] = MappingProxyType(
    {
        "RunHealth": _health_curves,
        "KLByPosition": _kl_map,
        "GradTerms": _gradient_norms,
        "StepLedger": _step_rows,
        "HackWatch": _hacking,
        "Direction": _drift,
        "FrozenProbe": _frozen_curves,
        "LogitShift": _shift_curve,
        "WordsMoved": _won_mass,
        "WeightDelta": _norm_curve,
    }
)
