"""Plots of the built-in probes' records; every other probe's records as a table."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from types import MappingProxyType
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from rlhf_lab.probes import Run
from rlhf_lab.probes.store import records_file
from rlhf_lab.training.run_dir import reading
from rlhf_lab.views import html
from rlhf_lab.views.color import Kind
from rlhf_lab.views.direction_pictures import drift_parts
from rlhf_lab.views.kl_pictures import kl_by_position_parts
from rlhf_lab.views.ledger import stored_ledger
from rlhf_lab.views.plots import Curve, Picture, bars, curves, heatmap
from rlhf_lab.views.selection import best_cell, held_out
from rlhf_lab.views.shift_pictures import cause_bars
from rlhf_lab.views.tokens import color_key, largest, tokens_html

Records = list[dict[str, Any]]
PageParts = list[Picture | str]
"""What a page shows, in order: pictures, and fragments of HTML between them."""
SHOWN_SAMPLES = 3
SHOWN_RECORDS = 20
HEALTH_CURVES = (
    ("reward", ("mean_reward", "gold_reward", "optimal_reward")),
    ("KL, nats per sequence", ("kl_per_sequence", "optimal_kl_per_sequence")),
    ("price of KL and reward spread", ("beta_eff", "reward_std")),
    ("learning", ("explained_variance", "clip_fraction")),
)
STEP_COLUMNS = MappingProxyType(
    {
        "phase": "phase",
        "step": "step",
        "clipped_surrogate": "clipped surrogate",
        "value_loss": "− value loss",
        "entropy_bonus": "+ entropy bonus",
        "kl_penalty": "− KL penalty",
        "objective": "= objective",
        "kl_coef": "KL coefficient",
    }
)
"""The terms with the signs that they have in the objective."""


def short_site(site: str) -> str:
    """A hook name as a label: blocks.1.hook_resid_post -> 1 post."""
    return site.removeprefix("blocks.").replace(".hook_resid_", " ").replace(".hook_", " ")


def series_of(records: Records, names: Sequence[str]) -> dict[str, Curve]:
    """The fields that any record has, over phases, by their labels."""
    phases, series = [record["phase"] for record in records], {}
    for name in names:
        values = [record.get(name) for record in records]
        optimal = name.startswith("optimal_")
        label = "exact optimum at beta_eff" if optimal else name.replace("_", " ")
        if any(value is not None for value in values):
            series[label] = (phases, values)
    return series


def curve_figures(records: Records, groups: Sequence[tuple[str, Sequence[str]]]) -> PageParts:
    """Side by side, a picture per title of the fields that any record has."""
    shown = [(title, series_of(records, names)) for title, names in groups]
    pictures = [curves(series, title) for title, series in shown if series]
    return ['<div class="figures">', *pictures, "</div>"]


def run_health_parts(run: Run, name: str, records: Records) -> PageParts:
    """Reward, KL, the price of KL, and how far a phase may move."""
    return curve_figures(records, HEALTH_CURVES)


def value_lens_parts(run: Run, name: str, records: Records) -> PageParts:
    """How well the target can be read by layer and position, first and last."""
    parts: PageParts = []
    for record in _ends([r for r in records if "r2" in r]):
        grid = [
            [x if there else None for x, there in zip(row, flags, strict=True)]
            for row, flags in zip(record["r2"], record["defined"], strict=True)
        ]
        title = f"phase {record['phase']}: R2 of value, read linearly, held out"
        sites = [short_site(site) for site in record["sites"]]
        title += held_out(record)
        parts.append(heatmap(grid, sites, record["slots"], title, limits=(0.0, 1.0)))
        parts.append(best_cell(record, "r2", grid, sites, record["slots"]))
    return parts


def direction_parts(run: Run, name: str, records: Records) -> PageParts:
    """Accuracy by layer and position, first and last, with Bayes' rule beside it; then drift."""
    parts: PageParts = []
    for record in _ends(records):
        n = len(record["accuracy"][0])
        slots = record.get("slots", [str(t) for t in range(n)])
        grid, rows = list(record["accuracy"]), [short_site(site) for site in record["sites"]]
        if "bayes_accuracy" in record:
            grid, rows = [*grid, record["bayes_accuracy"]], [*rows, "Bayes' rule"]
        title = f"phase {record['phase']}: accuracy of the direction, held out{held_out(record)}"
        parts.append(heatmap(grid, rows, slots, title, limits=(0.5, 1.0)))
        parts.append(best_cell(record, "accuracy", record["accuracy"], rows, slots))
    if "sequences" in records[-1]:
        parts += drift_parts(records, [short_site(site) for site in records[0]["sites"]])
    return parts


def logit_shift_parts(run: Run, name: str, records: Records) -> PageParts:
    """The parts of the shift in the last phase, and its sum over phases."""
    words = _settings(run, name)
    what = f"{words.get('word', 'word')} - {words.get('other', 'other')}"
    last = records[-1]
    title = f"phase {last['phase']}: shift of logit({what}), {last['measured_shift']:+.3f} in all"
    parts: PageParts = [bars(last["components"], {"shift": last["shift"]}, title)]
    if "own_weights" in last:
        parts.append(cause_bars(last))
    if last.get("grammar_log_odds") is not None:
        parts.append(
            f"<p>The grammar's own log odds of {escape(what)} average "
            f"{last['grammar_log_odds']:+.3f} on this text; the reference misses them by "
            f"{last['reference_error']:.3f} nats on average.</p>"
        )
    series = series_of(records, ["measured_shift"])
    return [*parts, curves(series, f"shift of logit({what})")]


def weight_delta_parts(run: Run, name: str, records: Records) -> PageParts:
    """The largest deltas of the last phase as a table."""
    rows = sorted(records[-1]["rows"], key=lambda row: -row["norm"])[:16]
    keys = ["name", "norm", "relative", "stable_rank", "k90", "unchanged", "unchanged_bf16"]
    keys += [key for key in ("overlap_unembedding",) if any(key in row for row in rows)]
    table = html.table(keys, [[row.get(key) for key in keys] for row in rows])
    series = series_of(records, ["total_norm"])
    return [table, curves(series, "distance of the weights from the reference")]


def text_heatmap_parts(run: Run, name: str, records: Records) -> PageParts:
    """Every field of a few samples, in the first and in the last recorded phase."""
    parts: PageParts = []
    if run.args.normalize_reward:
        parts.append(
            "<p>Values and advantages are in units of the standardised reward; exact ones are in "
            "the reward's own.</p>"
        )
    for record in _ends(records):
        tensors = run.tensors(name, record["phase"])
        parts.append(f"<h4>phase {record['phase']}</h4>")
        for field in _field_order(tensors):
            parts.append(_field(record, tensors, field))
    return parts


def _field_order(tensors: dict[str, Any]) -> list[str]:
    """Each quantity followed by its exact counterpart."""
    own = [f for f in tensors if not f.startswith("true_") and not f.endswith("mask")]
    return [f for field in own for f in (field, f"true_{field}") if f in tensors]


def _field(record: dict[str, Any], tensors: dict[str, Any], field: str) -> str:
    """One quantity on the samples, all on one scale."""
    mask = tensors["truth_mask" if field.startswith("true_") else "mask"]
    kind = "sequential" if field in ("kl", "entropy", "true_value") else "diverging"
    limit = largest(tensors[field].flatten(), mask.flatten())
    label = field.replace("true_", "exact ").replace("_", " ")
    if limit == 0:
        return f"<p>{label} is 0 on every token of these samples.</p>"
    rows = zip(record["tokens"][:SHOWN_SAMPLES], tensors[field], mask, strict=False)
    lines = [_sample(*row, label, limit, kind) for row in rows]
    return color_key(label, limit, kind).fragment + "".join(lines)


def _sample(
    tokens: list[str],
    values: Float[Tensor, " gen"],
    mask: Bool[Tensor, " gen"],
    label: str,
    limit: float,
    kind: Kind = "diverging",
) -> str:
    """A prompt without colours, and the numbers of its generated tokens."""
    prefix_len = len(tokens) - len(mask)
    numbers, counts = functional.pad(values, (prefix_len, 0)), functional.pad(mask, (prefix_len, 0))
    return tokens_html(tokens, numbers, label, counts, limit, kind).fragment


def step_ledger_parts(run: Run, name: str, records: Records) -> PageParts:
    """The terms of the objective in every recorded step, and the last of them token by token."""
    last = records[-1]
    ledger = stored_ledger(run, last["phase"], name)
    shares = ledger.entries["share"]
    limit = largest(shares.flatten())
    order = shares.abs().sum(1).argsort(descending=True).tolist()
    lines = [
        _sample(ledger.tokens[row], shares[row], ledger.mask[row], "share", limit)
        for row in order[:SHOWN_SAMPLES]
    ]
    note = (
        f"<h4>phase {last['phase']}, step {last['step'] + 1} of {last['steps']}: what each token "
        f"adds to the objective</h4><p>The {len(lines)} of {len(order)} sequences that weigh most, "
        f"and sequence {order[0]} in full.</p>"
    )
    key = color_key("share of the objective", limit).fragment
    rows = [[record[term] + (term == "step") for term in STEP_COLUMNS] for record in records]
    terms = html.table(list(STEP_COLUMNS.values()), rows, words=())
    return [terms, note, key, *lines, ledger.html(order[0]).fragment]


def any_records(records: Records) -> str:
    """What is a plain number or word in the last records, as a table."""
    if not records:
        return "<p>It recorded nothing.</p>"
    keys = [k for k, v in records[-1].items() if isinstance(v, int | float | str | None)]
    shown = records[-SHOWN_RECORDS:]
    note = "" if len(shown) == len(records) else f"<p>The last {len(shown)} of {len(records)}.</p>"
    return note + html.table(keys, [[record.get(key) for key in keys] for record in shown])


VIEWS: Mapping[str, Callable[[Run, str, Records], PageParts]] = MappingProxyType(
    {
        "RunHealth": run_health_parts,
        "StepLedger": step_ledger_parts,
        "TextHeatmap": text_heatmap_parts,
        "KLByPosition": kl_by_position_parts,
        "ValueLens": value_lens_parts,
        "Direction": direction_parts,
        "LogitShift": logit_shift_parts,
        "WeightDelta": weight_delta_parts,
    }
)


def probe_html(run: Run, name: str) -> str:
    """All that is worth seeing of one probe's records, as a fragment of HTML.

    Raises:
        RunError: no such probe recorded anything, or its records lack what the picture shows.
    """
    return as_html(_parts(run, name))


def probe_plots(run: Run, name: str) -> list[Picture]:
    """The pictures among what is worth seeing of one probe's records.

    Raises:
        RunError: see `probe_html`.
    """
    return [part for part in _parts(run, name) if isinstance(part, Picture)]


def as_html(parts: PageParts) -> str:
    """Pictures as figures, and what is between them."""
    return "".join(figure(part) if isinstance(part, Picture) else part for part in parts)


def _parts(run: Run, name: str) -> PageParts:
    records, view = run.records(name), VIEWS.get(_settings(run, name).get("kind"))
    if view is None or not records:
        return [any_records(records)]
    with reading(run.path / records_file(name)):
        return view(run, name, records)


def _settings(run: Run, name: str) -> dict[str, Any]:
    """What the run's store says of a probe."""
    probes = run.store.read_suite()["probes"]
    return next((probe for probe in probes if probe["name"] == name), {})


def figure(picture: Picture) -> str:
    """A picture as a figure with its caption for those who cannot see it."""
    return f'<figure role="img" aria-label="{escape(picture.alt)}">{picture.html()}</figure>'


def _ends(records: Records) -> Records:
    """The first and the last record, or the only one."""
    return records[:1] + records[1:][-1:]
