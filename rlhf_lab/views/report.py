"""The page about one or several runs: questions, curves, samples, probes and checks."""

import inspect
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import torch

from rlhf_lab import probes
from rlhf_lab.files import is_marked, validate_replaceable, write_marked
from rlhf_lab.functional import seed_interval
from rlhf_lab.probes import Run
from rlhf_lab.probes.run import StoredCheck
from rlhf_lab.probes.store import CHECKS, NOTES
from rlhf_lab.training.report import reward_metric
from rlhf_lab.training.run_dir import INFO, METRICS, RETURNED, RunDir, reading
from rlhf_lab.views.answers import answer_questions
from rlhf_lab.views.collect import RunData, collect_runs, page_data
from rlhf_lab.views.intervals import bracketed, final_metrics, sample_ends
from rlhf_lab.views.interventions import interventions_html
from rlhf_lab.views.page import assemble
from rlhf_lab.views.pictures import Html, Table, formatted, plain
from rlhf_lab.views.probe_pictures import number_table
from rlhf_lab.views.records import Snapshot, curves_over

REPORT_CURVES: tuple[tuple[str, str, str], ...] = (
    ("reward", "reward", "mean_reward true_reward"),
    ("KL from the reference", "nats per sequence", "kl_per_sequence kl_to_initial_per_sequence"),
    ("entropy", "nats per token", "entropy_per_token"),
    ("variance of the returns that values explain", "fraction", "explained_variance"),
    ("samples that are grammatical", "fraction", "grammatical_fraction"),
    ("clip fraction", "fraction", "clip_fraction"),
    ("ratio before the first step", "ratio", "ratio_first_minibatch"),
    ("norm of the gradient", "objective per unit of weight", "grad_norm"),
    ("prompts whose responses all have one reward", "fraction", "uninformative_group_fraction"),
)
NO_PROBES = "<p>This run had no probes. Train with <code>--probes</code>, or attach some.</p>"
SEEDS = "The first table has the mean of each metric if the runs differ in their seed only."
LARGEST_FRAME = 2 * 2**20  # letters of a page that a notebook stores in its file


def write_report(run_path: str | Path, out: str | Path | None = None) -> Path:
    """Write one self-contained HTML file about a run, and return its path.

    Args:
        run_path: directory of the run.
        out: the file, `report.html` in the run by default. Only an earlier page is replaced.

    Raises:
        RunError: If there is no run, one of its files is damaged, or the page cannot be written.
    """
    run = Run(run_path)
    path = Path(out) if out is not None else run.path / "report.html"
    validate_replaceable(path, is_marked)
    write_marked(path, runs_page([run]))
    return path


def page_frame(run_path: str | Path | RunDir) -> Html:
    """Return the page in a frame for a notebook; a large page is written to a file instead."""
    run = Run(run_path)
    page = runs_page([run])
    if len(page) > LARGEST_FRAME:
        return Html(f"<p>The page is large. Open {escape(str(write_report(run.path)))}.</p>")
    style = "width:100%;height:820px;border:0"
    return Html(
        f'<iframe title="{escape(run.path.name)}" sandbox="allow-scripts" style="{style}" '
        f'srcdoc="{escape(page)}"></iframe>'
    )


def runs_page(runs: Sequence[Run], version: str = "") -> str:
    """Return the page about one run or several; `version` is of the files, if it is served."""
    data = collect_runs(runs)
    header, blocks = page_data(data)
    samples = '<div data-form="samples-form"></div>' if blocks["s"] else "<p>No sample yet.</p>"
    with reading(runs[0].path / METRICS if len(runs) == 1 else Path(METRICS)):
        curves_of_metrics, answers = _curves(data), [answer_questions(run) for run in runs]
    body = [curves_of_metrics, _section("samples", "Samples", samples), _probes(data)]
    if len(runs) == 1:
        name, (run,) = runs[0].path.name, runs
        causes = interventions_html(run, bool(version))
        body.append(_section("interventions", "Interventions", causes))
        for read, file in ((_checks, CHECKS), (_returned, RETURNED), (_arguments, INFO)):
            with reading(run.path / file):
                body.append(read(run))
        with reading(run.path / INFO):
            body = [_failed(run), _facts(run), _questions(data, answers, body), *body]
    else:
        name = f"{len(runs)} runs"
        body = [_headline(data), *body, _questions(data, answers, body)]
    header |= {"version": version}
    return assemble(name, _state(data, version), "\n".join(body), header, blocks)


def _section(id: str, title: str, content: str) -> str:
    return f'<section id="{id}"><h2 tabindex="-1">{title}</h2>{plain(content)}</section>'


def _listed(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" * bool(items)


def _state(runs: Sequence[RunData], version: str) -> str:
    """Return the status of each run, and how many checks hold, for the bar."""
    parts = []
    for i, data in enumerate(runs):
        info, checks = data.run.info, data.run.checks()
        n = sum(not check.ok for check in checks)
        status = escape(str(info.get("status", "unknown")))
        if len(runs) > 1:
            label = escape(data.label)
            link = f'<a class="run" href="{i}/">{label}</a>' if version else label
            parts.append(f"{link} {status}" + f", {n} checks failed" * bool(n))
        else:
            done = f"{info.get('phases_done', 0)} of {info['args']['total_phases']} phases"
            held = f"{len(checks) - n} of {len(checks)} checks hold" if checks else "no checks"
            parts += [status, done, f'<a class="bad" href="#failed">{held}</a>' if n else held]
    return " · ".join(parts)


def _facts(run: Run) -> str:
    info = run.info
    label, name = info.get("rewarded_class"), info["args"]["reward_fn"]
    reward = f"{name}, the class {label['label']}" if label else name
    facts = {"policy": info["args"]["base_model"], "reward": reward, "device": info.get("device")}
    facts |= {f"final {name}": value for name, value in final_metrics(run).items()}
    listed = "".join(
        f"<li><b>{escape(name)}</b> {escape(formatted(value))}</li>"
        for name, value in facts.items()
    )
    found = (info.get("diagnostics") or {}).values()
    lines = _listed(f"since phase {x['phase']}: {x['text']}" for x in found)
    warning = f'<h2 class="bad">To look at</h2>{lines}' if lines else ""
    return f'{warning}<ul class="facts">{listed}</ul>'


def _headline(runs: Sequence[RunData]) -> str:
    """Return the last metrics of each run, their mean over seeds, and the settings that differ."""
    args = [data.run.info["args"] for data in runs]
    names = [name for name in args[0] if len({json.dumps(x.get(name)) for x in args}) > 1]
    last, rows, means = [], [], {}
    for data in runs:
        lines = data.run.metrics() or [{}]
        last.append(lines[-1] | (data.run.info.get("final") or {}))
    for name in (m for _, _, fields in REPORT_CURVES for m in fields.split()):
        rows.append([name.replace("_", " "), *(metrics.get(name) for metrics in last)])
        means[len(rows) - 1] = _mean_with_interval(rows[-1][1:])
    rows += [[name, *(json.dumps(x.get(name)) for x in args)] for name in names]
    columns = ["", *(data.label for data in runs)]
    if names == ["seed"]:
        columns.append("mean [95 % t interval]")
        rows = [[*row, means.get(i)] for i, row in enumerate(rows)]
    rows = [row for row in rows if any(x is not None for x in row[1:])]
    note = "Final metrics of finished runs, those of the last phase of others; other settings."
    return _section("headline", "Runs", Table(columns, rows, note=note).fragment)


def _mean_with_interval(values: Sequence[float | None]) -> str | None:
    known = torch.tensor([x for x in values if x is not None])
    if len(known) < len(values) or not known.isfinite().all():
        return None
    found = seed_interval(known, torch.zeros_like(known))
    ends = (None if end is None else float(end) for end in (found.low, found.high))
    return bracketed(float(found.value), *ends)


def _failed(run: Run) -> str:
    rows = [[c.phase, c.probe, c.name, c.value, c.tolerance] for c in run.checks() if not c.ok]
    columns = ["phase", "probe", "identity", "error", "tolerance"]
    title = "Failed checks: do not rely on these records"
    return _section("failed", title, Table(columns, rows).fragment) if rows else ""


def _questions(runs: Sequence[RunData], answers: Sequence[list], body: Sequence[str]) -> str:
    """Return ten questions with the answers of each run and a link to their section."""
    rows = []
    for i, of_runs in enumerate(zip(*answers, strict=True), 1):
        question, text, place = of_runs[0]
        has_place = any(f'id="{place}"' in section for section in body)
        link, text = f'<a href="#{place}">{question}</a>' if has_place else question, escape(text)
        if place == "arguments" and len(runs) > 1:
            link, text = f'<a href="#headline">{question}</a>', SEEDS
        elif len(runs) > 1:
            pairs = zip(runs, of_runs, strict=True)
            text = _listed(f"{data.label}: {answer}" for data, (_, answer, _) in pairs)
        rows.append(f'<li id="q{i}">{link} {text}</li>')
    return _section("questions", "Ten questions", f'<ol class="questions">{"".join(rows)}</ol>')


def _curves(runs: Sequence[RunData]) -> str:
    """Return curves of metrics with bands, or of several runs one picture per metric."""
    records, counts, is_one = {}, set(), len(runs) == 1
    for data in runs:
        ends, n = sample_ends(data.run)
        lines = [line | ends.get(line["phase"], {}) for line in data.run.metrics()]
        records[data.label] = [Snapshot(data.run, "", line) for line in lines]
        counts.add(n)
    if not any(records.values()):
        return _section("curves", "Curves", "<p>No phase is done yet.</p>")
    groups, parts = [(title, unit, names.split()) for title, unit, names in REPORT_CURVES], []
    if is_one:
        by_name = [x for x in runs[0].run.metrics()[-1] if x.startswith(reward_metric(""))]
        groups.insert(1, ("several rewards, before they are weighted", "reward", by_name))
    for title, unit, names in groups:
        for fields in filter(None, [names] if is_one else [[name] for name in names]):
            columns = {name.replace("_", " "): name for name in fields}
            label = f"{title}: {next(iter(columns))}" if len(fields) < len(names) else title
            columns = columns if is_one else dict.fromkeys(records, fields[0])
            lines = records[runs[0].label] if is_one else records
            picture = curves_over(lines, label, columns, unit)
            figure = f'<figure id="curve-{escape(fields[0])}"'
            parts += [picture.fragment.replace("<figure", figure, 1)] if picture else []
    of = f"the {n} sequences" if counts == {n} and n else "the sequences"
    note = f'<p class="note">Bands: 95 %, bootstrap over {of} of each phase.</p>'
    return _section("curves", "Curves", f'<div class="figures">{"".join(parts)}</div>{note}')


def _probes(runs: Sequence[RunData]) -> str:
    """Return a fold per probe with places for the pictures of one run, or of two."""
    folds, is_note = [], ' class="note"'
    tag = lambda tag, text, kind="": f"<{tag}{kind}>{escape(text)}</{tag}>" * bool(text)
    for name, kind in {name: kind for data in runs for name, kind in data.kinds.items()}.items():
        known = getattr(probes, kind, None)
        known = known if isinstance(known, type) and issubclass(known, probes.Probe) else None
        doc = (inspect.getdoc(known) or "" if known else "").partition("\n\n")[0].replace("`", "")
        caveat = f"Caveat: {known.caveat}" if known and known.caveat else ""
        question = tag("span", known.question, is_note) if known else ""
        sides = "".join(
            f'<div class="side"><p class="note"></p><div class="at" data-side="{side}" '
            f'data-probe="{escape(name)}"></div></div>'
            for side in "ab"[: len(runs)]
        )
        folds.append(
            f'<details class="probe"><summary>{tag("h3", name)}{question}</summary>'
            f'<div id="{escape(name)}">{tag("p", doc)}{tag("p", caveat, is_note)}'
            f'<div class="sides">{sides}</div></div></details>'
        )
    lines = ""
    for run in [data.run for data in runs]:
        with reading(run.path / NOTES):
            lines += _listed(f"phase {n['phase']}: {n['probe']}: {n['note']}" for n in run.notes())
    off = f"<h3>Refused or switched off</h3>{lines}" if lines else ""
    return _section("probes", "Probes", ("".join(folds) or NO_PROBES) + off)


def _checks(run: Run) -> str:
    """Return each identity once, with its worst value over the phases."""
    found: dict[tuple[str, str], list[StoredCheck]] = {}
    for check in run.checks():
        found.setdefault((check.probe, check.name), []).append(check)
    rows = []
    for key, checks in found.items():
        worst = max(checks, key=lambda check: (not check.ok, check.value))
        rows.append([*key, worst.value, worst.tolerance, len(checks), worst.ok])
    n = sum(not row[-1] for row in rows)
    note = f"{n} of {len(rows)} do not hold." if n else "All hold."
    columns = ["probe", "identity", "largest error", "tolerance", "times", "holds"]
    table = _folded(note, Table(columns, rows)) if rows else "<p>None ran.</p>"
    return _section("checks", "Identity checks", table)


def _folded(summary: str, table: Table) -> str:
    return f'<details class="fold"><summary>{summary}</summary>{table.fragment}</details>'


def _returned(run: Run) -> str:
    tables = {escape(name): number_table(run.returned(name)) for name in run.functions()}
    parts = [f"<h3>{name}</h3>{table.fragment}" for name, table in tables.items()]
    title = "Returned by functions on events"
    return _section("returned", title, "".join(parts)) if parts else ""


def _arguments(run: Run) -> str:
    info = run.info
    rows = [[name, json.dumps(value)] for name, value in info["args"].items()]
    versions = ", ".join(f"{name} {number}" for name, number in info.get("versions", {}).items())
    table = _folded(f"{len(rows)} arguments", Table(["argument", "value"], rows))
    return _section("arguments", "Arguments", f"{table}<p>{escape(versions)}</p>")
