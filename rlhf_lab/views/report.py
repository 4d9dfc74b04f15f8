"""The page about one or several runs: questions, curves, samples, probes and checks."""

import base64
import hashlib
import inspect
import json
import zlib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch

from rlhf_lab import probes
from rlhf_lab.console import visible
from rlhf_lab.files import AnyPath, expand_home, is_marked, validate_replaceable, write_marked
from rlhf_lab.functional import seed_interval
from rlhf_lab.probes import Run
from rlhf_lab.probes.run import StoredCheck
from rlhf_lab.probes.store import CHECKS, NOTES
from rlhf_lab.training.report import reward_metric
from rlhf_lab.training.run_dir import INFO, METRICS, RETURNED, reading
from rlhf_lab.views.answers import answer_questions
from rlhf_lab.views.collect import LabeledRuns, label_runs, page_data
from rlhf_lab.views.intervals import final_metrics, sample_ends
from rlhf_lab.views.interventions import N_TEXTS, SECONDS_PER_JOB, default_patch, interventions
from rlhf_lab.views.marks import SVG_STYLE
from rlhf_lab.views.pictures import Html, Table, paragraph
from rlhf_lab.views.probe_pictures import number_table
from rlhf_lab.views.records import Snapshot, curves_over
from rlhf_lab.views.templates import formatted, read_web, render

FRACTIONS = "grammatical_fraction steps_fraction faithful_fraction dropped_carry_fraction "
FRACTIONS += "direct_fraction sure_fraction"
REPORT_CURVES: tuple[tuple[str, str, str], ...] = (
    ("reward", "reward", "mean_reward true_reward"),
    ("KL from the reference", "nats per sequence", "kl_per_sequence kl_to_initial_per_sequence"),
    ("entropy", "nats per token", "entropy_per_token"),
    ("variance of the returns that values explain", "fraction", "explained_variance"),
    ("fractions of the samples", "fraction", FRACTIONS),
    ("clip fraction", "fraction", "clip_fraction"),
    ("ratio before the first step", "ratio", "ratio_first_minibatch"),
    ("norm of the gradient", "objective per unit of weight", "grad_norm"),
    ("prompts whose responses all have one reward", "fraction", "uninformative_group_fraction"),
)
SEEDS = "The first table has the mean of each metric if the runs differ in their seed only."
SCRIPTS = ("data.js", "state.js", "samples.js", "token.js", "jobs.js", "live.js", "main.js")
LARGEST_FRAME = 2 * 2**20  # letters of a page that a notebook stores in its file


def write_report(run_path: AnyPath, out: str | Path | None = None) -> Path:
    """Write one self-contained HTML file about a run, and return its path.

    Args:
        run_path: directory of the run.
        out: the file, `report.html` in the run by default. Only an earlier page is replaced.

    Raises:
        RunError: If there is no run, one of its files is damaged, or the page cannot be written.
    """
    run = Run(run_path)
    path = expand_home(out) if out is not None else run.path / "report.html"
    validate_replaceable(path, is_marked)
    write_marked(path, runs_page([run]))
    return path


def page_frame(run_path: AnyPath) -> Html:
    """Return the page in a frame for a notebook; a large page is written to a file instead."""
    run = Run(run_path)
    page = runs_page([run])
    if len(page) > LARGEST_FRAME:
        return paragraph(f"The page is large. Open {write_report(run.path)}.")
    style = "width:100%;height:820px;border:0"
    return Html(
        f'<iframe title="{escape(run.path.name)}" sandbox="allow-scripts" style="{style}" '
        f'srcdoc="{escape(page)}"></iframe>'
    )


def runs_page(runs: Sequence[Run], version: str = "") -> str:
    """Return the page about one run or several; `version` is of the files, if it is served.

    The page has all its data: JSON that the script reads first, and packed blocks for first use.
    """
    labeled = label_runs(runs)
    header, blocks = page_data(labeled)
    content = {"runs": labeled, "version": version, "has_samples": bool(blocks["s"])}
    with reading(runs[0].path / METRICS if len(runs) == 1 else Path(METRICS)):
        content |= _curves(labeled) | {"questions": _questions(labeled)}
    content |= {"probes": _probes(runs), "notes": _notes(runs)}
    if len(runs) == 1:
        (run,) = runs
        content |= {"title": run.path.name} | interventions(run)
        for read, file in ((_checks, CHECKS), (_returned, RETURNED), (_facts, INFO)):
            with reading(run.path / file):
                content |= read(run)
    else:
        content |= {"title": f"{len(runs)} runs", "headline": _headline(labeled)}
    style, script = f"{read_web('page.css')}\n{SVG_STYLE}", read_web(*SCRIPTS)
    content |= {
        "style": style,
        "script": script,
        "digests": {"style": _digest(style), "script": _digest(script)},
        "header": header | {"version": version},
        "blocks": {id: _packed(block) for id, block in blocks.items()},
        "patch": default_patch(runs[0]),
        "n_texts": N_TEXTS,
        "seconds": SECONDS_PER_JOB,
    }
    return visible(render("page.html", **content))


def _packed(block: Any) -> str:
    text = json.dumps(block, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _questions(runs: LabeledRuns) -> list[tuple[str, str, list[str]]]:
    rows = []
    for of_runs in zip(*map(answer_questions, runs.values()), strict=True):
        question, answer, place = of_runs[0]
        if len(runs) == 1:
            rows.append((question, place, [answer]))
        elif place == "arguments":
            rows.append((question, "headline", [SEEDS]))
        else:
            pairs = zip(runs, of_runs, strict=True)
            rows.append((question, place, [f"{label}: {x}" for label, (_, x, _) in pairs]))
    return rows


def _headline(runs: LabeledRuns) -> Table:
    args = [run.info["args"] for run in runs.values()]
    names = [name for name in args[0] if len({json.dumps(x.get(name)) for x in args}) > 1]
    last = [(run.metrics() or [{}])[-1] | (run.info.get("final") or {}) for run in runs.values()]
    rows, columns = [], ["", *runs, "mean [95 % t interval]"]
    for name in (m for _, _, fields in REPORT_CURVES for m in fields.split()):
        values = [metrics.get(name) for metrics in last]
        if any(x is not None for x in values):
            rows.append([name.replace("_", " "), *values, _mean_with_interval(values)])
    rows += [[name, *(json.dumps(x.get(name)) for x in args), None] for name in names]
    if names != ["seed"]:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    note = "Final metrics of finished runs, those of the last phase of others; other settings."
    return Table(columns, rows, note=note)


def _mean_with_interval(values: Sequence[float | None]) -> str | None:
    known = torch.tensor([x for x in values if x is not None])
    if len(known) < len(values) or not known.isfinite().all():
        return None
    found = seed_interval(known, torch.zeros_like(known))
    ends = (None if end is None else float(end) for end in (found.low, found.high))
    return formatted(float(found.value), *ends)


def _curves(runs: LabeledRuns) -> dict[str, Any]:
    records, counts, is_one = {}, set(), len(runs) == 1
    for label, run in runs.items():
        ends, n = sample_ends(run)
        lines = [line | ends.get(line["phase"], {}) for line in run.metrics()]
        records[label] = list(map(Snapshot, lines))
        counts.add(n)
    if not any(records.values()):
        return {"curves": []}
    groups, parts = [(title, unit, names.split()) for title, unit, names in REPORT_CURVES], []
    if is_one:
        lines = records[label]
        by_name = sorted(x for x in set().union(*run.metrics()) if x.startswith(reward_metric("")))
        groups.insert(1, ("several rewards, before they are weighted", "reward", by_name))
    for title, unit, names in groups:
        for fields in filter(None, [names] if is_one else [[name] for name in names]):
            columns = {name.replace("_", " "): name for name in fields}
            label = f"{title}: {next(iter(columns))}" if len(fields) < len(names) else title
            columns = columns if is_one else dict.fromkeys(records, fields[0])
            picture = curves_over(lines if is_one else records, label, columns, unit)
            if picture:
                figure = f'<figure id="curve-{escape(fields[0])}"'
                parts.append(Html(picture.fragment.replace("<figure", figure, 1)))
    of = f"the {n} sequences" if counts == {n} and n else "the sequences"
    return {"curves": parts, "n_samples": of}


def _probes(runs: Sequence[Run]) -> list[dict[str, str]]:
    found = []
    for name, kind in {k: kind for run in runs for k, kind in run.kinds().items()}.items():
        known = getattr(probes, kind, None)
        is_known = isinstance(known, type) and issubclass(known, probes.Probe)
        doc = (inspect.getdoc(known) or "") if is_known else ""
        words = {field: getattr(known, field, "") for field in ("question", "caveat")}
        found.append({"name": name, "doc": doc.partition("\n\n")[0].replace("`", ""), **words})
    return found


def _notes(runs: Sequence[Run]) -> list[str]:
    lines = []
    for run in runs:
        with reading(run.path / NOTES):
            lines += [f"phase {n['phase']}: {n['probe']}: {n['note']}" for n in run.notes()]
    return lines


def _checks(run: Run) -> dict[str, Any]:
    """Return the failed checks, and each identity once with its worst value over the phases."""
    by_name: dict[tuple[str, str], list[StoredCheck]] = {}
    for check in run.checks():
        by_name.setdefault((check.probe, check.name), []).append(check)
    rows = []
    for key, checks in by_name.items():
        worst = max(checks, key=lambda check: (not check.ok, check.value))
        rows.append([*key, worst.value, worst.tolerance, len(checks), worst.ok])
    n = sum(not row[-1] for row in rows)
    columns = ["probe", "identity", "largest error", "tolerance", "times", "holds"]
    failed = [[c.phase, c.probe, c.name, c.value, c.tolerance] for c in run.checks() if not c.ok]
    return {
        "checks": Table(columns, rows),
        "checks_hold": f"{n} of {len(rows)} do not hold." if n else "All hold.",
        "failed": Table(["phase", "probe", "identity", "error", "tolerance"], failed),
    }


def _returned(run: Run) -> dict[str, Any]:
    return {"returned": {name: number_table(run.returned(name)) for name in run.functions()}}


def _facts(run: Run) -> dict[str, Any]:
    info = run.info
    label, name = info.get("sources", {}).get("rewarded_class"), info["args"]["reward_fn"]
    reward = f"{name}, the class {label['label']}" if label else name
    facts = {"policy": info["args"]["base_model"], "reward": reward, "device": info.get("device")}
    facts |= {f"final {name}": value for name, value in final_metrics(run).items()}
    found = (info.get("diagnostics") or {}).values()
    arguments = [[name, json.dumps(value)] for name, value in info["args"].items()]
    return {
        "facts": facts,
        "diagnostics": [f"since phase {x['phase']}: {x['text']}" for x in found],
        "arguments": Table(["argument", "value"], arguments),
        "versions": [f"{name} {number}" for name, number in info.get("versions", {}).items()],
    }
