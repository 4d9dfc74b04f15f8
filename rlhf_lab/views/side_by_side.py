"""The page about several runs: one curve and one column per run, and pictures side by side."""

import json
import textwrap
from collections.abc import Sequence
from html import escape
from typing import Any

import torch

from rlhf_lab.functional import seed_interval
from rlhf_lab.training.run_dir import METRICS, reading
from rlhf_lab.views import html
from rlhf_lab.views.answers import answer_questions
from rlhf_lab.views.collect import RunData, page_data
from rlhf_lab.views.intervals import bracketed
from rlhf_lab.views.page import assemble
from rlhf_lab.views.pictures import Curves
from rlhf_lab.views.probe_pictures import fragment
from rlhf_lab.views.report import REPORT_CURVES, probes_section, samples_section, section

FIRST_COMPONENTS, LONGEST_WORDS = 3, 80  # components, and letters of a list of words


def runs_page(runs: Sequence[RunData], version: str = "") -> str:
    """Return the page about several runs; it has the headline numbers, curves and all samples."""
    header, blocks = page_data(runs)
    body = [
        _headline(runs),
        _curves(runs),
        samples_section(blocks["s"]),
        probes_section(runs),
        _answers(runs),
    ]
    state = " · ".join(
        f'<a class="run" href="{i}/">{escape(data.label)}</a> {escape(_status(data))}'
        if version
        else f"{escape(data.label)} {escape(_status(data))}"
        for i, data in enumerate(runs)
    )
    title = f"{len(runs)} runs"
    return assemble(title, state, "\n".join(body), header | {"version": version}, blocks)


def _status(data: RunData) -> str:
    failed = sum(not check.ok for check in data.run.checks())
    failing = f", {failed} checks failed" if failed else ""
    return str(data.run.info.get("status", "unknown")) + failing


def _headline(runs: Sequence[RunData]) -> str:
    """Return the last metrics of each run, their mean over seeds, and the settings that differ."""
    args = [data.run.info["args"] for data in runs]
    names = [name for name in args[0] if len({json.dumps(x.get(name)) for x in args}) > 1]
    are_seeds = names == ["seed"]
    last: list[dict[str, Any]] = []
    for data in runs:
        with reading(data.run.path / METRICS):
            lines = data.run.metrics()
        last.append((lines[-1] if lines else {}) | (data.run.info.get("final") or {}))
    rows = []
    for name in (m for _, _, fields in REPORT_CURVES for m in fields.split()):
        values = [metrics.get(name) for metrics in last]
        if any(x is not None for x in values):
            mean = [_mean_with_interval(values)] if are_seeds else []
            rows.append([name.replace("_", " "), *values, *mean])
    shifts = [_shifts(data) for data in runs]
    rows.append(["shift of the logits of", *(words for words, _ in shifts)])
    for i in range(FIRST_COMPONENTS):
        ranked = [parts[i] if i < len(parts) else None for _, parts in shifts]
        rows.append([f"largest shift {i + 1}", *ranked])
    rows = [row for row in rows if any(x is not None for x in row[1:])]
    rows += [[name, *(json.dumps(x.get(name)) for x in args)] for name in names]
    width = 1 + len(runs) + are_seeds
    rows = [[*row, *[None] * (width - len(row))] for row in rows]
    mean = ["mean [95 % t interval]"] if are_seeds else []
    table = html.table(["", *(data.label for data in runs), *mean], rows)
    note = "Final metrics of finished runs, those of the last phase of others; then the "
    note += "components with the largest shift of logits, and the settings that differ."
    return section("headline", "Runs", table + f'<p class="note">{note}</p>')


def _mean_with_interval(values: Sequence[float | None]) -> str | None:
    known = torch.tensor([x for x in values if x is not None])
    if len(known) < len(values) or not known.isfinite().all():
        return None
    found = seed_interval(known, torch.zeros_like(known))
    ends = (None if end is None else float(end) for end in (found.low, found.high))
    return bracketed(float(found.value), *ends)


def _shifts(data: RunData) -> tuple[str | None, list[str]]:
    """Return the words in the last record of WordsMoved, and components by size."""
    name = next((name for name, kind in data.kinds.items() if kind == "WordsMoved"), None)
    record = data.run.records(name)[-1] if name else {}
    if not record.get("parts"):
        return None, []
    pairs = zip(record["parts"], record["components"], strict=True)
    parts = [f"{component} {x:+.3f}" for x, component in sorted(pairs, key=lambda x: -abs(x[0]))]
    return textwrap.shorten(record["first"], LONGEST_WORDS, placeholder=" ..."), parts


def _curves(runs: Sequence[RunData]) -> str:
    """Return one picture per metric, with a curve per run."""
    figures, lines = [], {data.label: data.run.metrics() for data in runs}
    for title, unit, fields in REPORT_CURVES:
        for name in fields.split():
            series = {}
            for run_label, metrics in lines.items():
                values = [line.get(name) for line in metrics]
                if any(x is not None for x in values):
                    series[run_label] = [line["phase"] for line in metrics], values
            label = f"{title}: {name.replace('_', ' ')}" if " " in fields else title
            figures += [fragment(Curves(series, label, unit))] if series else []
    grid = f'<div class="figures">{"".join(figures)}</div>'
    return section("curves", "Curves", grid if figures else "<p>No phase is done yet.</p>")


def _answers(runs: Sequence[RunData]) -> str:
    """Return the ten questions with the answer of each run."""
    answers = [answer_questions(data.run) for data in runs]
    items = []
    for of_runs in zip(*answers, strict=True):
        lines = "".join(
            f"<li>{escape(data.label)}: {escape(answer)}</li>"
            for data, (_, answer, _) in zip(runs, of_runs, strict=True)
        )
        items.append(f"<li><b>{escape(of_runs[0][0])}</b><ul>{lines}</ul></li>")
    return section("questions", "Ten questions", f'<ol class="questions">{"".join(items)}</ol>')
