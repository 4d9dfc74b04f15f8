"""Plots of the built-in probes' records; every other probe's records as a table."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from types import MappingProxyType
from typing import Any

from rlhf_lab.probes import Run
from rlhf_lab.probes.run_health import FREE_KL
from rlhf_lab.probes.store import records_file
from rlhf_lab.training.run_dir import reading
from rlhf_lab.views import html
from rlhf_lab.views.attention_pictures import attention_drift_parts
from rlhf_lab.views.direction_pictures import drift_parts
from rlhf_lab.views.frozen_pictures import frozen_probe_parts
from rlhf_lab.views.gradient_pictures import grad_terms_parts
from rlhf_lab.views.hack_pictures import hack_watch_parts
from rlhf_lab.views.intervals import bracketed
from rlhf_lab.views.kl_attribution_pictures import kl_attribution_parts
from rlhf_lab.views.kl_pictures import kl_by_position_parts
from rlhf_lab.views.neuron_pictures import neuron_rank_parts
from rlhf_lab.views.picture import Picture
from rlhf_lab.views.plots import Curve, Ends, curves, heatmap
from rlhf_lab.views.sample_intervals import BandsByMetric, sample_bands
from rlhf_lab.views.selection import best_cell, held_out
from rlhf_lab.views.shift_pictures import shift_parts
from rlhf_lab.views.step_pictures import step_influence_parts
from rlhf_lab.views.token_pictures import step_ledger_parts, text_heatmap_parts
from rlhf_lab.views.transplant_pictures import component_transplant_parts
from rlhf_lab.views.value_attribution_pictures import value_attribution_parts
from rlhf_lab.views.value_pictures import short_site, value_lens_parts

Records = list[dict[str, Any]]
PageParts = list[Picture | str]
"""What a page shows, in order: pictures, and fragments of HTML between them."""
NO_BANDS: BandsByMetric = MappingProxyType({})
SHOWN_RECORDS = 20
SHOWN_DELTAS, SHOWN_SPECTRA = 16, 6
OVERLAP_COLUMNS = ("overlap_unembedding", "energy_unembedding")
Group = tuple[str, str, tuple[str, ...]]
"""A figure of curves: its title, the unit of its y axis, and the fields that it draws."""
HEALTH_CURVES: tuple[Group, ...] = (
    ("reward", "reward", ("mean_reward", "true_reward", "optimal_reward")),
    ("KL from the reference", "nats per sequence", ("kl_per_sequence", "optimal_kl_per_sequence")),
    ("beta_eff: what a nat of KL costs", "raw reward per nat", ("beta_eff",)),
    ("spread", "standard deviation", ("reward_std", "advantage_std")),
    ("learning", "share", ("explained_variance", "clip_fraction")),
    ("entropy", "nats per token", ("entropy_per_token",)),
    ("norm of the gradient", "objective per unit of weight", ("grad_norm",)),
    ("before the first step, furthest from 1", "ratio", ("ratio_first_minibatch",)),
)


def label_of(name: str) -> str:
    """What a field is called in a legend."""
    return "exact optimum at beta_eff" if name.startswith("optimal_") else name.replace("_", " ")


def series_of(records: Records, names: Sequence[str]) -> dict[str, Curve]:
    """The fields that any record has, over phases, by their labels."""
    phases, series = [record["phase"] for record in records], {}
    for name in names:
        values = [record.get(name) for record in records]
        if any(value is not None for value in values):
            series[label_of(name)] = (phases, values)
    return series


def bands_of(records: Records, names: Sequence[str], bands: BandsByMetric) -> dict[str, Ends]:
    """The intervals of the fields that have some: in the record itself, or among `bands`."""
    found: dict[str, Ends] = {}
    for name in names:
        own = [(r.get(f"{name}_low"), r.get(f"{name}_high")) for r in records]
        given = bands.get(name, {})
        ends = [given.get(r["phase"], pair) for r, pair in zip(records, own, strict=True)]
        if any(low is not None for low, _ in ends) and any(
            r.get(name) is not None for r in records
        ):
            found[label_of(name)] = tuple(zip(*ends, strict=True))
    return found


def curve_figures(
    records: Records,
    groups: Sequence[Group],
    bands: BandsByMetric = NO_BANDS,
) -> PageParts:
    """Side by side, a picture per group of the fields that any record has."""
    pictures = [
        curves(series, title, y_label=unit, bands=bands_of(records, names, bands))
        for title, unit, names in groups
        if (series := series_of(records, names))
    ]
    return ['<div class="figures">', *pictures, "</div>"]


def band_note(n: int | None) -> str:
    """What the bands about the curves are."""
    of = "the sequences of each phase" if n is None else f"the {n} sequences of each phase"
    return f"<p>Bands: 95 %, bootstrap over {of}.</p>"


def run_health_parts(run: Run, name: str, records: Records) -> PageParts:
    """Reward, KL, the price of KL, and how far a phase may move."""
    bands, n = sample_bands(run)
    n = records[-1].get("sequences", n)
    figures = curve_figures(records, HEALTH_CURVES, bands)
    return [*figures, band_note(n), *_optimum_note(records)]


def _optimum_note(records: Records) -> PageParts:
    """What the line of the exact optimum is, and in which phases there is none."""
    if not any("optimal_reward" in record for record in records):
        return []
    without = [r["phase"] for r in records if r.get("optimal_reward") is None]
    note = (
        "The exact optimum is the best policy at that phase's beta_eff, which is kl_coef times the "
        "standard deviations that advantages and rewards were divided by."
    )
    if without:
        phases = ", ".join(map(str, without))
        note += (
            f" It has no point in phase {phases}: beta_eff was not above {FREE_KL:g} there (as "
            "when nearly all rewards of a phase are the same), and KL that costs next to nothing "
            "has no optimum to compare with."
        )
    return [f"<p>{note}</p>"]


def direction_parts(run: Run, name: str, records: Records) -> PageParts:
    """Accuracy by layer and position, first and last, with Bayes' rule beside it; then drift."""
    parts: PageParts = []
    for record in _ends(records):
        n = len(record["accuracy"][0])
        slots = record.get("slots", [str(t) for t in range(n)])
        marks = [" *" if told else "" for told in record.get("informed", [False] * n)]
        slots = [slot + mark for slot, mark in zip(slots, marks, strict=True)]
        grid, rows = list(record["accuracy"]), [short_site(site) for site in record["sites"]]
        if "bayes_accuracy" in record:
            grid, rows = [*grid, record["bayes_accuracy"]], [*rows, "Bayes' rule"]
        title = f"phase {record['phase']}: accuracy of the direction, held out{held_out(record)}"
        parts.append(heatmap(grid, rows, slots, title, limits=(0.5, 1.0)))
        parts.append(best_cell(record, "accuracy", record["accuracy"], rows, slots))
        if "informed" in record:
            parts.append("<p>* The text up to here tells something of the label.</p>")
    if "sequences" in records[-1]:
        parts += drift_parts(records, [short_site(site) for site in records[0]["sites"]])
    return parts


def logit_shift_parts(run: Run, name: str, records: Records) -> PageParts:
    """The parts of the shift in the last phase, and its sum over phases."""
    words = _settings(run, name)
    what = f"{words.get('word', 'word')} - {words.get('other', 'other')}"
    last, parts = records[-1], shift_parts(run, name, records, what)
    if last.get("grammar_log_odds") is not None:
        odds, error = (
            bracketed(last[key], last.get(f"{key}_low"), last.get(f"{key}_high"))
            for key in ("grammar_log_odds", "reference_error")
        )
        n = last.get("defined_sequences")
        parts.append(
            f"<p>The grammar's own log odds of {escape(what)} average {odds} on this text"
            f"{'' if n is None else f' (n = {n})'}; the reference misses them by {error} nats on "
            "average.</p>"
        )
    return parts


def weight_delta_parts(run: Run, name: str, records: Records) -> PageParts:
    """The largest deltas of the last phase: sizes as a table, and their singular values."""
    every = records[-1]["rows"]
    rows = sorted(every, key=lambda row: -row["norm"])[:SHOWN_DELTAS]
    keys = ["name", "norm", "relative", "stable_rank", "k90", "unchanged", "unchanged_bf16"]
    keys += [key for key in OVERLAP_COLUMNS if any(key in row for row in rows)]
    table = html.table(keys, [[row.get(key) for key in keys] for row in rows])
    note = f"<p>Phase {records[-1]['phase']}, the {len(rows)} largest of {len(every)}.</p>"
    spectra = {row["name"]: (range(1, 1 + len(row["s"])), row["s"]) for row in rows[:SHOWN_SPECTRA]}
    series = series_of(records, ["total_norm"])
    return [
        note,
        table,
        curves(spectra, "singular values of the largest deltas", "singular value"),
        curves(series, "distance of the weights from the reference"),
    ]


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
        "AttentionDrift": attention_drift_parts,
        "ComponentTransplant": component_transplant_parts,
        "RunHealth": run_health_parts,
        "GradTerms": grad_terms_parts,
        "StepInfluence": step_influence_parts,
        "StepLedger": step_ledger_parts,
        "TextHeatmap": text_heatmap_parts,
        "HackWatch": hack_watch_parts,
        "KLAttribution": kl_attribution_parts,
        "KLByPosition": kl_by_position_parts,
        "ValueLens": value_lens_parts,
        "ValueAttribution": value_attribution_parts,
        "Direction": direction_parts,
        "FrozenProbe": frozen_probe_parts,
        "LogitShift": logit_shift_parts,
        "NeuronRank": neuron_rank_parts,
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
