"""Fields and pictures of the built-in probes that no declaration can describe."""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import combinations
from typing import Any

from rlhf_lab.probes.run_health import FREE_KL
from rlhf_lab.probes.tuned_lens import PENALTIES
from rlhf_lab.views.declared import (
    BarsOf,
    Calls,
    CurvesOver,
    Drawn,
    Snapshot,
    TableOf,
    named,
)
from rlhf_lab.views.intervals import bracketed, mean_of_rows, whisker_ends
from rlhf_lab.views.ledger import interval_of_terms, stored_ledger
from rlhf_lab.views.pictures import Curves, Table
from rlhf_lab.views.plots import heatmaps

MOST_POSITIONS = 60  # positions of a lens
NATS = "nats per token"


def short_site(site: str) -> str:
    """Return a hook name as a label: blocks.1.hook_resid_post -> 1 post."""
    return site.removeprefix("blocks.").replace(".hook_resid_", " ").replace(".hook_", " ")


def tensor(name: str, *index: Any) -> Any:
    """Return a field that is an entry of a tensor."""
    return lambda at: at.tensors[name][index]


def sites(at: Snapshot, name: str = "sites") -> list[str]:
    """Return the short names of the sites."""
    return [short_site(site) for site in at[name]]


def entry(field: str, *index: int) -> tuple[Any, Any, Any]:
    """Return a column: an entry of a field of lists, and of its ends."""

    def read(name: str) -> Any:
        def value(at: Snapshot) -> Any:
            found = at.get(name)
            for i in index:
                found = None if found is None else found[i]
            return found

        return value

    return read(field), read(f"{field}_low"), read(f"{field}_high")


def quoted(words: Sequence[str]) -> list[str]:
    """Return words, in quotes if they have spaces around them."""
    return [word if word == word.strip() else repr(word) for word in words]


def with_numbers(words: Sequence[str], numbers: Sequence[float], form: str) -> str:
    """Return words with a number after each."""
    pairs = zip(quoted(words), numbers, strict=True)
    return ", ".join(f"{word} {x:{form}}" for word, x in pairs)


def optimum_note(records: Sequence[Snapshot]) -> Iterator[Drawn]:
    """Explain the exact optimum and the phases without one."""
    if not any("optimal_reward" in at.record for at in records):
        return
    missing = [at.record["phase"] for at in records if at.record.get("optimal_reward") is None]
    note = (
        f" It has no point in phase {', '.join(map(str, missing))}: beta_eff was not above "
        f"{FREE_KL:g} there (as when nearly all rewards of a phase are the same)."
    )
    yield (
        "<p>The exact optimum is the best policy at that phase's beta_eff, which is kl_coef "
        "times the standard deviations that advantages and rewards were divided by."
        f"{note if missing else ''}</p>"
    )


def head_patterns(at: Snapshot) -> Iterator[Drawn]:
    """Causes by key of the two heads that moved most, and the patterns of up to 16."""
    causes = {"pattern (QK)": "qk", "values (OV)": "ov", "W_O": "wo"}
    sizes = sum(at.tensors[x] for x in causes.values()).abs().sum(2).mean(-1).flatten()
    for i in sizes.argsort(descending=True)[:2].tolist():
        by_key = {
            label: tensor(name, i // at.tensors[name].shape[1], i % at.tensors[name].shape[1])
            for label, name in causes.items()
        }
        series = {label: found(at).mean(-1) for label, found in by_key.items()}
        picture = BarsOf(f"{at['heads'][i]}: causes by key", "keys", series)
        yield picture.draw(at)
    chosen = sorted(sizes.argsort(descending=True)[:16].tolist())
    patterns = {
        f"{at['heads'][i]}: {at['tv_here'][i]:.2f}": at.tensors["tv"].flatten(0, 1)[i].tolist()
        for i in chosen
    }
    title = f"phase {at['phase']}: half the mean difference of patterns, queries by keys"
    yield heatmaps(patterns, at["queries"], at["keys"], title)
    yield at.format(
        "<p>After each head, the total variation of its pattern at {query}, where causes are "
        "taken: a pattern that moves far need not change what is written.</p>"
    )


def gradient_curves(records: Sequence[Snapshot]) -> Iterator[Drawn]:
    """Norms of the whole gradients and their cosines over phases, without rounding errors."""
    phases = [at.record["phase"] for at in records]
    labels = [term.replace("_", " ") for term in records[-1]["terms"]]
    norms = [at.tensors["norms"] for at in records]
    over = {label: (phases, [x[i, -1].item() for x in norms]) for i, label in enumerate(labels)}
    yield Curves(over, "norm of each term's whole gradient")
    series = {}
    for a, b in combinations(range(len(labels)), 2):
        pulls = [x[[a, b], -1].min() > 1e-6 * x.max() for x in norms]
        cosines = [at.tensors["cosines"][a, b, -1].item() for at in records]
        values = [x if pull else None for x, pull in zip(cosines, pulls, strict=True)]
        if any(pulls):
            series[f"{labels[a]}, {labels[b]}"] = phases, values
    if series:
        yield Curves(series, "cosine of two terms' whole gradients")


def alarms(records: Sequence[Snapshot]) -> Iterator[Drawn]:
    """A row per record that has an alarm."""
    last, words = records[-1], lambda found: ", ".join(found) or "–"
    rows = [
        [at["phase"], words(at["alarms_by_logits"]), words(at["alarms_by_texts"]), at["saturated"]]
        for at in records
        if at["alarms_by_logits"] or at["alarms_by_texts"] or at["saturated"]
    ]
    yield last.format(
        "<p>An alarm names a word that is twice as likely as in the reference, and {alarm_z:.4g} "
        "standard errors more. Rewards are saturated where their standard deviation is less than "
        "{saturated_below:.3g}.</p>"
    )
    columns = ["phase", "by the logits", "by the texts alone", "saturated"]
    yield (
        Table(columns, rows, words=(1, 2))
        if rows
        else f"<p>No alarm in {len(records)} records.</p>"
    )


def repetition(measure: str, title: str) -> CurvesOver:
    """Return the declaration of one measure of repetition, for each n."""

    def series(at: Snapshot) -> dict[str, Any]:
        return {
            f"{label}, n = {n}": lambda at, i=i, key=key: at[f"{measure}_{key}"][i]
            for i, n in enumerate(at["orders"])
            for key, label in (("texts", "policy"), ("reference", "reference"))
        }

    return CurvesOver(title, series, "fraction")


def moved_words(at: Snapshot) -> Iterator[Drawn]:
    """Words with more probability, and words that are generated more often."""
    moved = at.tensors["promoted_mass"].abs().sum().item() / 2
    ours, theirs = at.tensors["counts"].sum(1).tolist()
    for field, note in (
        (
            "promoted",
            f"by the logits: probability won in states of the policy's texts; "
            f"{moved:.3g} of it moved, n = {ours} tokens",
        ),
        (
            "taken_up",
            "by the texts alone: log odds compared with the reference's texts; "
            f"n = {ours} and {theirs} tokens",
        ),
    ):
        columns = {key.replace("_", " "): f"{field}.{key}" for key in at[field][0]}
        columns["token"] = lambda at, field=field: quoted(at[f"{field}.token"])
        yield TableOf(note, columns).draw(at)


def best_cell(
    record: dict[str, Any],
    name: str,
    grid: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    slots: Sequence[str],
) -> str:
    """A sentence on the best cell of a grid: its interval, and among how many it was selected."""
    cells = [(x, i, j) for i, row in enumerate(grid) for j, x in enumerate(row) if x is not None]
    low, high = record.get(f"{name}_low"), record.get(f"{name}_high")
    if not cells or low is None or high is None:
        return ""
    best, i, j = max(cells)
    held = record.get("held_out", record.get("sequences", {}).get("held"))
    widths = [high[k][m] - low[k][m] for _, k, m in cells if None not in (low[k][m], high[k][m])]
    widest = f"; the widest interval of all is {max(widths):.2f} wide" if widths else ""
    ends = f"[{low[i][j]:.2f}, {high[i][j]:.2f}]" if low[i][j] is not None else "no interval"
    return (
        f"<p>Best of the {len(cells)} compared: {best:.2f} {ends} at {escape(rows[i])}, "
        f"{escape(slots[j])} (95 %, bootstrap over {held} held-out "
        f"sequences){widest}.</p>"
    )


def best(field: str, grid: Any, rows: Any) -> Calls:
    """Return the sentence on the best cell of a grid."""

    def sentence(at: Snapshot) -> Iterator[Drawn]:
        if at.get(field) is not None and at.get("slots") is not None:
            yield best_cell(at.record, field, grid(at), rows(at), at["slots"])

    return Calls(sentence)


def defined_r2(at: Snapshot) -> list[list[float | None]]:
    """Return R2 with None if it is undefined."""
    both = zip(at["r2"], at["defined"], strict=True)
    return [[x if f else None for x, f in zip(*row, strict=True)] for row in both]


def drift(records: Sequence[Snapshot]) -> Iterator[Drawn]:
    """All fields of the cell that is most accurate in the first record, over phases."""
    first = records[0]
    cells = [(x, i, j) for i, row in enumerate(first["accuracy"]) for j, x in enumerate(row)]
    _, i, j = max(cells)  # of equal ones the last, as `best_cell`
    counts, where = first["sequences"], f"{sites(first)[i]}, {first.get('slots', range(999))[j]}"
    yield (
        f"<p>At {where}, the most accurate of {len(cells)} cells in the first record; fitted to "
        f"{counts['fitted']} sequences, evaluated on {counts['held']} others.</p>"
    )
    for title, fields in DRIFT.items():
        there = {k: entry(v, i, j) for k, v in named(fields).items() if v in first.record}
        if there:
            yield CurvesOver(title, there).draw_over(records, {})


DRIFT = {
    "accuracy of linear probes": "refitted: accuracy; the reference's: accuracy_frozen; "
    "Fisher's discriminant: accuracy_lda",
    "accuracy of controls": "direction ablated: accuracy_ablated; "
    "erased by LEACE: accuracy_erased; shuffled labels: accuracy_shuffled; "
    "random direction: accuracy_random",
    "AUC": "refitted: auc",
    "cosine": "with the reference's: cosine_with_reference; "
    "of two halves (floor): split_half_cosine",
    "projection on the reference's direction": "positive: positive_projection; "
    "negative: negative_projection",
}


def frozen_curves(records: Sequence[Snapshot]) -> Iterator[Drawn]:
    """The frozen and the refitted probe at the most accurate site of the first record."""
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
    refit = lambda at: at["accuracy_frozen"][i] - at["gap"][i]
    groups = {
        "accuracy of linear probes": {
            "frozen in phase 0": entry("accuracy_frozen", i),
            "refitted": refit,
            "shuffled labels": entry("accuracy_control", i),
            "Bayes' rule": entry("bayes_accuracy", 0),
        },
        "frozen probe minus refitted, and fraction called positive": {
            "frozen minus refitted": entry("gap", i),
            "called positive": entry("called", i),
        },
        f"shift along the frozen direction (classes are {first['size'][i]:.2f} apart)": {
            "shift": entry("shift", i)
        },
    }
    if min(at["split_half"][i] for at in records) >= 0.8:  # a lower floor hides any turn
        cosines = {"of both directions": entry("cosine", i)}
        groups["cosine"] = cosines | {"of two halves (floor)": entry("split_half", i)}
    for title, series in groups.items():
        yield CurvesOver(title, series).draw_over(records, {})


def steered(at: Snapshot) -> Iterator[Drawn]:
    """Continuations after adding the direction, compared with random directions."""
    if "alphas" not in at.record:
        return
    order = sorted(range(len(at["alphas"])), key=at["alphas"].__getitem__)
    for name in ("true_reward", "grammatical", "surprise"):
        series, ends = {}, {}
        for label, field, x in (
            ("frozen direction", name, "alphas"),
            ("random directions", f"{name}_random", "random_alphas"),
        ):
            at_x = order if x == "alphas" else range(len(at[x]))
            pick = lambda field, at_x=at_x: [at[field][i] for i in at_x]
            series[label] = pick(x), pick(field)
            if f"{field}_low" in at.record:
                ends[label] = pick(f"{field}_low"), pick(f"{field}_high")
        title = f"phase {at['phase']}: {name}, steered; n = {at['sequences']['steered']}"
        yield Curves(series, title, ends=ends, x_label="alpha, in differences of means")
    yield at.format(
        "<p>Added at {steered_at} and this slot, to held-out prefixes, with the same noise.</p>"
    )


def row_ends(field: str, *names: str) -> tuple[Any, Any, Any]:
    """Return a column: a field, and the interval of the mean over sequences of tensors' rows."""

    def end(i: int) -> Any:
        rows = lambda at: sum(at.tensors[name] for name in names or (field,))
        return lambda at: whisker_ends(mean_of_rows(rows(at)))[i]

    return field, end(0), end(1)


def shift_words(at: Snapshot) -> str:
    """Return the pair of words whose logits are compared."""
    probes = at.run.store.read_suite()["probes"]
    settings = next((probe for probe in probes if probe["name"] == at.name), {})
    return f"logit({settings.get('word', 'word')} - {settings.get('other', 'other')})"


def shift_notes(records: Sequence[Snapshot]) -> Iterator[Drawn]:
    """The measured shift over phases, and the log odds of the grammar."""
    ends = [whisker_ends(mean_of_rows(at.tensors["measured"][None])) for at in records]
    low, high = ([pair[i][0] for pair in ends] for i in (0, 1))
    values = [at["measured_shift"] for at in records]
    phases, last = [at["phase"] for at in records], records[-1]
    yield Curves(
        {"shift": (phases, values)}, f"shift of {shift_words(last)}", ends={"shift": (low, high)}
    )
    if last.get("grammar_log_odds") is not None:
        odds, error = (
            bracketed(*(last.get(f"{name}{end}") for end in ("", "_low", "_high")))
            for name in ("grammar_log_odds", "reference_error")
        )
        yield (
            f"<p>The log odds of the grammar average {odds} on this text (n = "
            f"{last.get('defined_sequences')}); the reference differs by {error} nats.</p>"
        )


def shift_causes(at: Snapshot) -> Iterator[Drawn]:
    """The shift of each component by cause; the legend has the sum of each cause."""
    series = {}
    for field, label in CAUSES.items():
        if field in at.record:
            (low,), (high,) = whisker_ends(mean_of_rows(at.tensors[field].sum(0, keepdim=True)))
            series[f"{label}, {bracketed(sum(at[field]), low, high)} in all"] = row_ends(field)
    if series:
        yield BarsOf("the shift by its causes", "components", series, "logits").draw(at)


CAUSES = {
    "own_weights": "own weights",
    "inherited": "inherited from earlier components",
    "scale": "the scale of the norm",
    "read_out": "unembedding",
}


def step_rows(records: Sequence[Snapshot]) -> Iterator[Drawn]:
    """The terms of the objective in every recorded step, with their intervals."""
    args, rows = records[-1].run.args, []
    for at in records:
        interval = interval_of_terms(at.tensors, args.loss_aggregation == "token_mean")
        n = int(at.tensors["mask"].sum())
        weights = {"entropy_bonus": args.ent_coef / n, "kl_penalty": at["kl_coef"] / n}
        cells = []
        for i, term in enumerate(SIGNED_TERMS):
            ends = (None, None)
            if interval.low is not None:
                ends = (weights.get(term, 1.0) * x[i].item() for x in (interval.low, interval.high))
            cells.append(bracketed(at[term], *ends))
        rows.append(
            [at["phase"], at["step"] + 1, interval.n, at["real_tokens"], *cells, at["kl_coef"]]
        )
    columns = ["phase", "step", "n", "tokens", *SIGNED_TERMS.values(), "KL coefficient"]
    yield Table(columns, rows, "terms of the objective", words=())


SIGNED_TERMS = {
    "clipped_surrogate": "clipped surrogate",
    "value_loss": "− value loss",
    "entropy_bonus": "+ entropy bonus",
    "kl_penalty": "− KL penalty",
    "objective": "= objective",
}


def heaviest_sequence(at: Snapshot) -> Iterator[Drawn]:
    """The ledger of the sequence with the largest shares."""
    ledger = stored_ledger(at.run, at["phase"], at.name)
    yield ledger.html(ledger.entries["share"].abs().sum(1).argmax().item()).fragment


def influence_columns(at: Snapshot) -> dict[str, Any]:
    """Effects of a step, and their terms."""
    effects = ("phase", "step", "f_before", "f_after", "linear", "remainder", "kappa")
    terms = {
        term: lambda at, i=i: at.tensors["terms"][i].sum().item()
        for i, term in enumerate(at["term_names"])
    }
    found: dict[str, Any] = {name: lambda at, name=name: at[name] for name in effects}
    found["step"] = lambda at: at["step"] + 1
    others = {
        name: lambda at, name=name: at.tensors[name].sum().item() for name in ("momentum", "decay")
    }
    return found | terms | others


def prefix_values(at: Snapshot) -> Iterator[Drawn]:
    """The policy's value after each prefix, and how all estimates correlate with it."""
    if "correlation" not in at.record:
        return
    names, value, error = at["estimates"], at.tensors["v_policy"], at.tensors["v_policy_se"]
    series: dict[str, Any] = {
        "policy": tuple(
            lambda at, x=x: x for x in (value, value - 1.96 * error, value + 1.96 * error)
        )
    }
    if "grammar" in names:
        series["grammar"] = at.tensors["estimates"][:, names.index("grammar")].tolist()
    where = at["slots"][at["prefix_pos"]] if "slots" in at.record else at["prefix_pos"]
    title = f"value after {where}, n = {len(at['prefix_rows'])} prefixes"
    by = lambda at: [f"text {i}" for i in at["prefix_rows"]]
    note = (
        "Each value is of {continuations} continuations (whiskers: 1.96 standard errors). "
        "{reliability:.0%} of the variance between prefixes is signal."
    )
    yield BarsOf(title, by, series, note=note, top=32).draw(at)
    labels = lambda at: [" ".join(map(short_site, name.split(" "))) for name in at["estimates"]]
    title = "correlation with {correlation_against}"
    yield BarsOf(title, labels, {"correlation": "correlation"}).draw(at)


def penalties(at: Snapshot) -> Iterator[Drawn]:
    """The variance left on texts that were held out of the fit, for each ridge penalty."""
    columns: dict[str, Any] = {"ridge": [f"{ridge:g}" for ridge in PENALTIES]}
    for label, name in (("linear probes", "ridge"), ("translators", "tuned_ridge")):
        if at.record.get(name) is not None and f"{name}_errors" in at.tensors:
            errors = at.tensors[f"{name}_errors"].flatten(0, -2).nanmean(0)
            columns[f"{label} (chosen: {at[name]:g})"] = errors.tolist()
    if len(columns) > 1:
        title = f"fraction of the variance left, by penalty, of {len(PENALTIES)} compared"
        yield TableOf(title, columns).draw(at)


def first_lens(name: str) -> Any:
    """Return a field: the lens of the first sequence."""
    return lambda at: at.tensors[name][:, 0, :MOST_POSITIONS] if name in at.tensors else None


def counted_slots(at: Snapshot) -> list[str]:
    """Return slots with the number of their sequences."""
    names = at.get("slots") or list(map(str, at["positions"]))
    return [f"{slot}, n = {n}" for slot, n in zip(names, at["n"], strict=True)]


def widest_slot(at: Snapshot) -> Iterator[Drawn]:
    """The slot whose values differ most, and the values themselves."""
    i = max(range(len(at["value_sd"])), key=at["value_sd"].__getitem__)
    title = f"standard deviation of each component's part at {counted_slots(at)[i]}"
    series = {"standard deviation": entry("sd", i)}
    yield BarsOf(title, "components", series).draw(at)
    title = "standard deviation of the values, in the head's unit"
    yield BarsOf(title, counted_slots, {"value": "value_sd"}).draw(at)
    yield f"<p>{at['dead']:.0%} of the head's hidden units are off in all of these states.</p>"


def accuracies(at: Snapshot) -> list[Any]:
    """Return accuracies by site and slot, and those of Bayes' rule."""
    return [*at["accuracy"], *([at["bayes_accuracy"]] if "bayes_accuracy" in at.record else [])]


def accuracy_rows(at: Snapshot) -> list[str]:
    """Return the names of the rows of `accuracies`."""
    return [*sites(at), "Bayes' rule"][: len(accuracies(at))]


def marked_slots(at: Snapshot) -> list[str] | None:
    """Return slots, with a star where the text up to there tells something of the label."""
    names, informed = at.get("slots"), at.get("informed")
    if not names or not informed:
        return names
    return [name + " *" * flag for name, flag in zip(names, informed, strict=True)]


def shift_bars(at: Snapshot) -> Iterator[Drawn]:
    """The shift of each component."""
    (low,), (high,) = whisker_ends(mean_of_rows(at.tensors["measured"][None]))
    whole, n = bracketed(at["measured_shift"], low, high), at.tensors["shift"].shape[-1]
    title = f"shift of {shift_words(at)}, n = {n}; {whole} in all"
    yield BarsOf(title, "components", {"shift": row_ends("shift")}, "logits").draw(at)


def neuron_columns(at: Snapshot) -> dict[str, Any]:
    """Return the columns of the table of neurons."""
    names = ("contribution", "by_activation", "activation", "activation_shift", "write", "group")
    active = zip(at["tokens"], at["token_activations"], strict=True)
    most = [with_numbers(*pair, ".3g") for pair in active]
    return (
        {"neuron": "neurons"} | {x.replace("_", " "): x for x in names} | {"most active at": most}
    )


def neuron_note(at: Snapshot) -> Iterator[Drawn]:
    """The fraction of the neurons in the table, and the means of all."""
    all_of_them = at.tensors["neuron_contribution"].abs().sum().item()
    share = sum(map(abs, at["contribution"])) / all_of_them if all_of_them else 0.0
    moved = at.tensors["neuron_activation_shift"].abs().mean().item()
    before, after = at.tensors["neuron_write"].abs().mean((1, 2)).tolist()
    yield (
        f"<p>The {len(at['neurons'])} neurons have {share:.0%} of the sizes of all contributions. "
        f"Activations move by {moved:.3g} on average; writes are {before:.3g} in the reference "
        f"and {after:.3g} in the policy, without their signs.</p>"
    )


def delta_columns(at: Snapshot) -> dict[str, Any]:
    """Return the columns of the table of weights; overlaps where a matrix has them."""
    names = "name norm relative stable_rank k90 unchanged unchanged_bf16".split()
    names += ["overlap_unembedding", "energy_unembedding"]
    there = [name for name in names if any(name in row for row in at["rows"])]
    return named("; ".join(f"rows.{name}" for name in there))


def delta_spectra(at: Snapshot) -> dict[str, list[float]]:
    """Return the singular values of the six largest changes."""
    rows = sorted(at["rows"], key=lambda row: -row["norm"])[:6]
    return {row["name"]: row["s"] for row in rows}
