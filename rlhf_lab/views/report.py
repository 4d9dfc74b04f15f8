"""The HTML report of a run: settings, curves, samples, probes and checks; no model is loaded."""

import inspect
import json
from html import escape
from pathlib import Path
from typing import Any

from rlhf_lab import probes
from rlhf_lab.errors import RunError
from rlhf_lab.files import is_marked, refuse_foreign, write_marked
from rlhf_lab.probes import Run
from rlhf_lab.probes.run import StoredCheck
from rlhf_lab.probes.store import CHECKS, FOLDER
from rlhf_lab.training.report import reward_metric
from rlhf_lab.training.run_dir import INFO, METRICS, RETURNED, SAMPLES, reading
from rlhf_lab.views import html
from rlhf_lab.views.answers import answer_questions
from rlhf_lab.views.declared import CurvesOver, Snapshot
from rlhf_lab.views.intervals import bracketed, final_bands, sample_bands
from rlhf_lab.views.probe_pictures import fragment, number_table, probe_html
from rlhf_lab.views.text import reward_color

REPORT_CURVES: tuple[tuple[str, str, str], ...] = (
    ("reward", "reward", "mean_reward true_reward"),
    ("KL from the reference", "nats per sequence", "kl_per_sequence kl_to_initial_per_sequence"),
    ("entropy", "nats per token", "entropy_per_token"),
    ("variance of the returns that values explain", "fraction", "explained_variance"),
    ("samples that are grammatical", "fraction", "grammatical_fraction"),
    ("prompts whose responses all have one reward", "fraction", "uninformative_group_fraction"),
)
REPORT_SAMPLES = 6


def write_report(run_path: str | Path, out: str | Path | None = None) -> Path:
    """Write one self-contained HTML file about a run, and return its path.

    It goes to `report.html` in the run's directory, or to `out`; an earlier page of ours that is
    there is replaced, and nothing else is.

    Raises:
        RunError: there is no run, one of its files is damaged, the page cannot be written, or
            something that is no page of ours is in its place.
    """
    run = Run(run_path)
    path = Path(out) if out is not None else run.path / "report.html"
    if path.is_dir():
        raise RunError(f"--out {path} is a directory; name a file, such as {path / 'report.html'}.")
    if not path.parent.is_dir():
        raise RunError(f"there is no directory {path.parent}; choose another --out.")
    refuse_foreign(path, is_marked)
    sections: list[str] = []
    for section, file in (
        (_heading, INFO),
        (_curves, METRICS),
        (_samples, SAMPLES),
        (_probes, FOLDER),
        (_checks, CHECKS),
        (_returned, RETURNED),
        (_arguments, INFO),
    ):
        with reading(run.path / file):
            sections.append(section(run))
    with reading(run.path / METRICS):
        sections.insert(1, _failed(run) + _questions(run, "".join(sections)))
    text = html.page(f"{run.path.name}: rlhf_lab", "\n".join(sections))
    write_marked(path, text)
    return path


def _heading(run: Run) -> str:
    info = run.info
    rows = [
        ["status", info.get("status", "unknown")],
        ["policy", info["args"]["base_model"]],
        ["reward", _reward_of(info)],
        ["phases", f"{info.get('phases_done', 0)} of {info['args']['total_phases']}"],
        ["device", info.get("device")],
    ]
    figures: dict[str, Any] = info.get("final") or {}
    ends = final_bands(run)
    for name, value in figures.items():
        shown = bracketed(value, *ends[name]) if name in ends else value
        rows.append([f"final {name}", shown])
    diagnostics = "".join(
        f"<li>since phase {found['phase']}: {escape(found['text'])}</li>"
        for found in (info.get("diagnostics") or {}).values()
    )
    warning = f"<h2>To look at</h2><ul>{diagnostics}</ul>" if diagnostics else ""
    return f"<h1>{escape(run.path.name)}</h1>" + html.table(None, rows, words=(0, 1)) + warning


def _failed(run: Run) -> str:
    """List the identity checks that failed, which come before everything else."""
    rows = [[c.phase, c.probe, c.name, c.value, c.tolerance] for c in run.checks() if not c.ok]
    columns = ["phase", "probe", "identity", "error", "tolerance"]
    table = html.table(columns, rows, words=(1, 2))
    return f"<h2>Failed checks: do not rely on these records</h2>{table}" if rows else ""


def _questions(run: Run, page: str) -> str:
    """Answer ten questions; each links to its section if the page has it."""
    rows = []
    for question, answer, place in answer_questions(run):
        link = f'<a href="#{place}">{question}</a>' if f'id="{place}"' in page else question
        rows.append(f"<li>{link} {escape(answer)}</li>")
    return f"<h2>Ten questions</h2><ul>{''.join(rows)}</ul>"


def _reward_of(info: dict[str, Any]) -> str:
    """The reward's name, with the class that is rewarded where there is one."""
    paid = info.get("rewarded_class")
    name = info["args"]["reward_fn"]
    return f"{name}, the class {paid['label']}" if paid else name


def _curves(run: Run) -> str:
    metrics = run.metrics()
    if not metrics:
        return "<h2>Curves</h2><p>No phase is done yet.</p>"
    by_name = [name for name in metrics[-1] if name.startswith(reward_metric(""))]
    title = "several rewards, before they are weighted"
    curves = [(name, unit, names.split()) for name, unit, names in REPORT_CURVES]
    curves[1:1] = [(title, "reward", by_name)] if by_name else []
    bands, n = sample_bands(run)
    records = [Snapshot(run, "", line) for line in metrics]
    figures = []
    for title, unit, names in curves:
        series = {name.replace("_", " "): name for name in names}
        picture = CurvesOver(title=title, unit=unit, series=series).draw_over(records, bands)
        figures += [fragment(picture)] if picture else []
    of = "the sequences" if n is None else f"the {n} sequences"
    note = f"<p>Bands: 95 %, bootstrap over {of} of each phase.</p>"
    grid = f'<div class="figures">{"".join(figures)}</div>'
    return f'<span id="curves"></span><h2>Curves</h2>{grid}{note}'


def _samples(run: Run) -> str:
    samples = run.samples()
    if not samples:
        return "<h2>Samples</h2><p>Nothing is written yet.</p>"
    first, last = samples[0]["phase"], samples[-1]["phase"]
    rewards = [sample["reward"] for sample in samples]
    limits = min(rewards), max(rewards)
    parts = ['<span id="samples"></span><h2>Samples</h2>']
    for phase in dict.fromkeys((first, last)):
        counted = f"after {phase} learning phase" + ("" if phase == 1 else "s")
        note = "before learning" if phase == 0 else counted
        is_final = phase >= run.info["args"]["total_phases"]  # of what no phase learns from
        title = f"Final samples, {note}" if is_final else f"Phase {phase}, {note}"
        there = [sample for sample in samples if sample["phase"] == phase]
        chosen = samples_by_rank(there, REPORT_SAMPLES)
        which = f"<p>{len(chosen)} of {len(there)}, from the lowest reward to the highest.</p>"
        parts.append(f"<h3>{title}</h3>{which}" + _sample_rows(chosen, limits))
    return "".join(parts)


def samples_by_rank(samples: list[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    """Samples of the lowest and the highest reward, and others at equal steps of rank between.

    The first ones of a batch, by contrast, may all be good or all be bad.
    """
    ranked = sorted(samples, key=lambda sample: sample["reward"])
    if len(ranked) <= n:
        return ranked
    return [ranked[round(i * (len(ranked) - 1) / (n - 1))] for i in range(n)]


def _sample_rows(samples: list[dict[str, Any]], limits: tuple[float, float]) -> str:
    """Reward and text; the bar's colour and the number say the same."""
    lines = []
    for sample in samples:
        color = reward_color(sample["reward"], *limits)
        style = f"border-left:8px solid {color};padding-left:.6rem;margin:.4rem 0"
        true_reward = sample.get("true_reward")
        by_name = {k: v for k, v in sample.items() if k.startswith(reward_metric(""))}
        beside = {} if true_reward is None else {"true_reward": true_reward}
        beside |= {name.removeprefix(reward_metric("")): v for name, v in by_name.items()}
        noted = ", ".join(f"{name} {value:.3f}" for name, value in beside.items())
        note = escape(f"{sample['reward']:.3f}" + (f" ({noted})" if noted else ""))
        lines.append(f'<p style="{style}"><code>{note}</code> {escape(sample["text"])}</p>')
    return "".join(lines)


def _probes(run: Run) -> str:
    there = run.probes()
    kinds = {probe["name"]: probe["kind"] for probe in run.store.read_suite()["probes"]}
    names = [name for name in kinds if name in there]
    if not names:
        return (
            "<h2>Probes</h2><p>This run had no probes. Train with <code>--probes</code>, or attach "
            "some in Python: <code>attach(trainer, default_suite(trainer))</code> of "
            "<code>rlhf_lab.probes</code>.</p>"
        )
    parts = [
        f'<span id="{escape(name)}"></span><h3>{escape(name)}</h3>'
        f"{_what_it_shows(kinds[name])}{probe_html(run, name)}"
        for name in names
    ]
    notes = "".join(
        f"<li>phase {note['phase']}: {escape(note['probe'])}: {escape(note['note'])}</li>"
        for note in run.notes()
    )
    note = f"<h3>Thinned, refused or switched off</h3><ul>{notes}</ul>" if notes else ""
    return "<h2>Probes</h2>" + "".join(parts) + note


def _what_it_shows(kind: str) -> str:
    """What a probe of the package records, in the words its class begins with."""
    known = getattr(probes, kind, None)
    words = inspect.getdoc(known) if isinstance(known, type) else None
    first = (words or "").partition("\n\n")[0].replace("`", "")
    return f"<p>{escape(first)}</p>" if first else ""


def _checks(run: Run) -> str:
    """Each identity once, with its worst value over the phases."""
    found: dict[tuple[str, str], list[StoredCheck]] = {}
    for check in run.checks():
        found.setdefault((check.probe, check.name), []).append(check)
    if not found:
        return "<h2>Identity checks</h2><p>None ran.</p>"
    rows = []
    for key, checks in found.items():
        missed = [check for check in checks if not check.ok]
        worst = missed[-1] if missed else max(checks, key=lambda check: check.value)
        rows.append([*key, worst.value, worst.tolerance, len(checks), not missed])
    failed = sum(not row[-1] for row in rows)
    note = "All hold." if not failed else f"{failed} of {len(rows)} do not hold."
    columns = ["probe", "identity", "worst miss", "tolerance", "times", "holds"]
    table = html.table(columns, rows, words=(0, 1))
    folded = f"<details><summary>{note}</summary>{table}</details>"
    return f"<h2>Identity checks</h2>{folded}"


def _returned(run: Run) -> str:
    """The last dicts that functions on events returned."""
    parts = [
        f"<h3>{escape(name)}</h3>{fragment(number_table(run.returned(name)))}"
        for name in run.functions()
    ]
    return "".join(["<h2>Returned by functions on events</h2>", *parts]) if parts else ""


def _arguments(run: Run) -> str:
    info = run.info
    rows = [[name, json.dumps(value)] for name, value in info["args"].items()]
    versions = ", ".join(f"{name} {number}" for name, number in info.get("versions", {}).items())
    table = html.table(["argument", "value"], rows, words=(0, 1))
    table = f"<details><summary>{len(rows)} arguments</summary>{table}</details>"
    return f'<span id="arguments"></span><h2>Arguments</h2>{table}<p>{escape(versions)}</p>'
