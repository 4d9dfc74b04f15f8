"""Pictures of the built-in probes: which fields of a record go to which picture."""

from collections.abc import Callable, Mapping
from html import escape
from types import MappingProxyType

from rlhf_lab.views.component_views import COMPONENT_VIEWS
from rlhf_lab.views.intervals import HOW
from rlhf_lab.views.pictures import Table
from rlhf_lab.views.probe_curves import GRADIENT, NATS, Pictures, named_terms
from rlhf_lab.views.records import (
    ENDS,
    MOST_SLOTS,
    Snapshot,
    matrix,
    record_bars,
    record_table,
    row_table,
    short_site,
    slots,
    strip,
)


def _kl_bars(at: Snapshot) -> Pictures:
    n, names = at["sequences"], slots(at, len(at["kl"]))
    ks = ("k1", "k2", "k3")
    series = {f"exact, n = {n['exact']}": "kl"} | {k: f"{k}_mean {k}_low {k}_high" for k in ks}
    note = f"Whiskers: {HOW}, of which the estimators have the first {n.get('estimated')}."
    yield record_bars(at, "exact KL and its estimators", names, series, NATS, note, MOST_SLOTS)
    variances = {k: at.get(f"{k}_var") for k in ks}
    deviations = {k: x and [v**0.5 for v in x] for k, x in variances.items()}
    note = "The mean square of a token's step in the exact value; the sum is the reward's variance."
    for title, series, unit, text in (
        ("standard deviation of the estimators", deviations, NATS, ""),
        ("information about the reward", {"I_t": "information"}, "reward squared", note),
        ("sequences with a token", {"sequences": "tokens_at"}, "", ""),
    ):
        yield record_bars(at, title, names, series, unit, text, MOST_SLOTS)


def _gradient_terms(at: Snapshot) -> Pictures:
    terms = named_terms(at)
    title = f"norm of each term's gradient, step {at['step'] + 1} of {at['steps']}"
    yield record_bars(at, title, "groups", dict(zip(terms, at["norms"], strict=True)), GRADIENT)
    cosines, ends = at.tensors["cosines"][..., -1], (-1.0, 1.0)
    title = "cosines of the terms' whole gradients"
    yield matrix(at, title, cosines, terms, terms, kind="diverging", limits=ends)


def _step_influence(at: Snapshot) -> Pictures:
    tensors = at.tensors
    effects = dict(zip(at["term_names"], tensors["terms"].flatten(1).sum(1).tolist(), strict=True))
    effects |= {name: tensors[name].sum().item() for name in ("momentum", "decay")}
    title = f"effect of step {at['step'] + 1} on the {at['target']} by cause"
    yield record_bars(at, title, list(effects), {"effect": list(effects.values())})
    note = "The samples that moved it most; a row is a fraction of the step at the actual Adam."
    title = f"what each token did to the {at['target']}"
    yield strip(at, title, tensors["rows"].sum(0), "moved", top=3, note=note)
    title = f"change of the {at['target']} by component and by the token's slot"
    rows = tensors["rows"].sum(1)
    yield matrix(at, title, rows, at["groups"], slots(at, rows.shape[1]), kind="diverging")
    yield f"<p>{escape(at.get('note') or '')}</p>"


def _step_shares(at: Snapshot) -> Pictures:
    title = f"step {at['step'] + 1} of {at['steps']}: what each token adds to the objective"
    yield strip(at, title, "share", "share", top=3)
    yield _ledger(at)


def _ledger(at: Snapshot) -> Table:
    """Return every column of the tokens of the sequence that adds most to the objective."""
    tensors, share = at.tensors, at.tensors["share"]
    i = share.abs().sum(1).argmax().item()
    texts, rows = at["tokens"][i][at["prefix_len"] :], []
    for t in tensors["mask"][i].nonzero().flatten().tolist():
        cells = [f"{tensors[name][i, t] + 0.0:z.{n}f}" for name, n in LEDGER.items()]
        is_bound = "yes" if tensors["clipped"][i, t] else "no"
        rows.append([texts[t].strip(), is_bound, *cells])
    note = (
        f"Sequence {i} adds {share[i].sum():.6f}; all {int(tensors['mask'].sum())} tokens of the "
        f"minibatch together give the objective, {at['objective']:.6f}. A large advantage need "
        "not be a large gradient: a token of log-probability 0 cannot become more likely."
    )
    columns = ["token", "clip binds", *(name.replace("_", " ") for name in LEDGER)]
    return Table(columns, rows, note=note)


# columns of a ledger, and their digits
LEDGER = dict.fromkeys("old_logprob logprob ratio advantage whitened return value kl".split(), 3)
LEDGER |= {"entropy": 3, "surrogate": 5, "value_loss": 5, "share": 5}


def _text_strips(at: Snapshot) -> Pictures:
    for field in STRIPS:
        is_exact, kind = field.startswith("true_"), "diverging"
        if field in ("kl", "true_value"):
            kind = "sequential"
        title = field.replace("true_", "exact ").replace("_", " ")
        mask, note = ("truth_mask", "In units of the reward.") if is_exact else ("mask", "")
        yield strip(at, title, field, title, kind, mask, rewards=at["rewards"], note=note)


STRIPS = tuple("advantage true_advantage value true_value kl".split())


def _moved_words(at: Snapshot) -> Pictures:
    moved = at.tensors["promoted_mass"].abs().sum().item() / 2
    n, n_reference = at.tensors["counts"].sum(1).tolist()
    title = f"by the logits: probability won in states of the policy's texts; {moved:.3g} of it "
    yield row_table(at, f"{title}moved, n = {n} tokens", "promoted")
    title = "by the texts alone: log odds compared with the reference's texts; "
    yield row_table(at, f"{title}n = {n} and {n_reference} tokens", "taken_up")


def _value_lens(at: Snapshot) -> Pictures:
    rows, n = list(map(short_site, at["sites"])), at.get("held_out")
    tuned = list(map(short_site, at.get("tuned_sites") or ()))
    if at.get("r2") is not None:
        grid, *ends = (at.get(f"r2{end}") for end in ENDS)
        known = (zip(*row, strict=True) for row in zip(grid, at["defined"], strict=True))
        grid, cols = [[x if f else None for x, f in row] for row in known], slots(at, len(grid[0]))
        title = f"R2 of {at['r2_against']}, linear probes, held out, n = {n}"
        yield matrix(at, title, (grid, *ends), rows, cols, limits=(0.0, 1.0), held=n)
        title = f"correlation of the value head with {at['r2_against']}, n = {at.get('head_n')}"
        yield record_bars(at, title, cols, {"correlation": "head_correlation"}, top=MOST_SLOTS)
    for name, layers in (("lens", rows), ("lens_tuned", tuned)):
        if name in at.tensors:
            values = at.tensors[name][:, 0, :MOST_SLOTS]
            title = f"value by layer, sequence 1, {'tuned' if layers is tuned else 'raw'} lens"
            cols = slots(at, values.shape[1])
            yield matrix(at, title, values, layers, cols, kind="diverging")
    title = f"R2 of both lenses as a forecast of the value, n = {at.get('lens_held_out')}"
    columns = {"raw lens": "raw_r2", "tuned lens": "tuned_r2"}
    yield record_table(at, title, {"layer": tuned, **columns}) if tuned else None


def _value_parts(at: Snapshot) -> Pictures:
    names = at.get("slots") or list(map(str, at["positions"]))
    names = [f"{slot}, n = {n}" for slot, n in zip(names, at["n"], strict=True)]
    by_slot = [at.get(f"sd{end}") for end in ENDS]
    grids = tuple(x if x is None else list(map(list, zip(*x, strict=True))) for x in by_slot)
    title = "standard deviation of each component's part of the value"
    yield matrix(at, title, grids, at["components"], names)
    yield record_bars(at, "standard deviation of the values", names, {"value": "value_sd"})


def _direction(at: Snapshot) -> Pictures:
    grids = [at.get(f"accuracy{end}") for end in ENDS]
    rows, bayes = list(map(short_site, at["sites"])), at.get("bayes_accuracy")
    if bayes is not None:
        rows, grids[0] = [*rows, "Bayes' rule"], [*grids[0], bayes]
    names, informed = slots(at, len(grids[0][0])), at.get("informed")
    if informed:
        names = [name + " *" * flag for name, flag in zip(names, informed, strict=True)]
    note = "Stars: the text up to there is informative about the label." if informed else ""
    title, n = "accuracy of the direction, held out", at["sequences"]["held"]
    column, limits = tuple(grids), (0.5, 1.0)
    yield matrix(at, f"{title}, n = {n}", column, rows, names, limits=limits, held=n, note=note)


def _frozen_sites(at: Snapshot) -> Pictures:
    note = "With split half below 0.8, a change of the axis cannot be distinguished from noise."
    yield record_table(at, "all sites", FROZEN_COLUMNS, note)


FROZEN_COLUMNS = (
    "sites accuracy_frozen gap called shift cosine split_half moved_cosine accuracy_control size"
)


OF_RECORD: Mapping[str, Callable[[Snapshot], Pictures]] = MappingProxyType(
    COMPONENT_VIEWS
    | {
        "KLByPosition": _kl_bars,
        "GradTerms": _gradient_terms,
        "StepInfluence": _step_influence,
        "StepLedger": _step_shares,
        "TextHeatmap": _text_strips,
        "HackWatch": _moved_words,
        "ValueLens": _value_lens,
        "ValueAttribution": _value_parts,
        "Direction": _direction,
        "FrozenProbe": _frozen_sites,
    }
)
