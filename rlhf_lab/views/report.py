"""The page about a run: questions, curves, samples, probes and checks; no model is loaded."""

import inspect
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from rlhf_lab import probes
from rlhf_lab.errors import RunError
from rlhf_lab.files import is_marked, refuse_foreign, write_marked
from rlhf_lab.probes import Run
from rlhf_lab.probes.run import StoredCheck
from rlhf_lab.probes.store import CHECKS
from rlhf_lab.training.report import reward_metric
from rlhf_lab.training.run_dir import INFO, METRICS, RETURNED, RunDir, reading
from rlhf_lab.views import html
from rlhf_lab.views.answers import answer_questions
from rlhf_lab.views.causes import interventions_html
from rlhf_lab.views.collect import RunData, collect_run, page_data
from rlhf_lab.views.intervals import bracketed, final_bands, sample_bands
from rlhf_lab.views.page import assemble
from rlhf_lab.views.probe_pictures import fragment, number_table
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
    if path.is_dir():
        raise RunError(f"--out {path} is a directory. Use a file, such as {path / 'report.html'}.")
    if not path.parent.is_dir():
        raise RunError(f"there is no directory {path.parent}. Choose another --out.")
    refuse_foreign(path, is_marked)
    write_marked(path, run_page(run))
    return path


def run_page(run: Run, version: str = "") -> str:
    """Return the page about a run.

    Args:
        version: of the run's files, if a server has later ones.
    """
    data = collect_run(run)
    header, blocks = page_data([data])
    sections = []
    for read, file in (
        (_facts, INFO),
        (_curves, METRICS),
        (_checks, CHECKS),
        (_returned, RETURNED),
        (_arguments, INFO),
    ):
        with reading(run.path / file):
            sections.append(read(run))
    facts, curves, *rest = sections
    causes = section("interventions", "Interventions", interventions_html(run, bool(version)))
    body = [curves, samples_section(data.rows), probes_section([data]), causes, *rest]
    with reading(run.path / METRICS):
        body = [_failed(run), facts, _questions(run, "".join(body)), *body]
    header |= {"version": version}
    return assemble(run.path.name, _state(run), "\n".join(body), header, blocks)


def page_frame(run_path: str | Path | RunDir) -> html.Html:
    """Return the page in a frame for a notebook; a large page is written to a file instead."""
    run = Run(run_path)
    page = run_page(run)
    if len(page) > LARGEST_FRAME:
        return html.Html(f"<p>The page is large. Open {escape(str(write_report(run.path)))}.</p>")
    style = "width:100%;height:820px;border:0"
    return html.Html(
        f'<iframe title="{escape(run.path.name)}" sandbox="allow-scripts" style="{style}" '
        f'srcdoc="{escape(page)}"></iframe>'
    )


def _state(run: Run) -> str:
    """Return the status, and how many checks hold, for the bar."""
    info, checks = run.info, run.checks()
    done = f"{info.get('phases_done', 0)} of {info['args']['total_phases']} phases"
    n = sum(not check.ok for check in checks)
    held = f"{len(checks) - n} of {len(checks)} checks hold" if checks else "no checks"
    held = f'<a class="bad" href="#failed">{held}</a>' if n else held
    return f"{escape(str(info.get('status', 'unknown')))} · {done} · {held}"


def _facts(run: Run) -> str:
    """Return models, reward, device and final metrics, and the diagnostics of the run."""
    info = run.info
    facts = {"policy": info["args"]["base_model"], "reward": _reward_of(info)}
    facts["device"] = info.get("device")
    final: dict[str, Any] = info.get("final") or {}
    ends = final_bands(run)
    for name, value in final.items():
        text = bracketed(value, *ends[name]) if name in ends else html.formatted(value)
        facts[f"final {name}"] = text
    listed = "".join(
        f"<li><b>{escape(name)}</b> {escape(html.formatted(value))}</li>"
        for name, value in facts.items()
    )
    diagnostics = "".join(
        f"<li>since phase {found['phase']}: {escape(found['text'])}</li>"
        for found in (info.get("diagnostics") or {}).values()
    )
    warning = f'<h2 class="bad">To look at</h2><ul>{diagnostics}</ul>' if diagnostics else ""
    return f'{warning}<ul class="facts">{listed}</ul>'


def _failed(run: Run) -> str:
    """List the identity checks that failed, which come before everything else."""
    rows = [[c.phase, c.probe, c.name, c.value, c.tolerance] for c in run.checks() if not c.ok]
    columns = ["phase", "probe", "identity", "error", "tolerance"]
    title = "Failed checks: do not rely on these records"
    return section("failed", title, html.table(columns, rows)) if rows else ""


def section(id: str, title: str, content: str) -> str:
    """Return a section of the page with its heading."""
    return f'<section id="{id}"><h2 tabindex="-1">{title}</h2>{html.plain(content)}</section>'


def _questions(run: Run, page: str) -> str:
    """Answer ten questions; each links to its section if the page has it."""
    rows = []
    for i, (question, answer, place) in enumerate(answer_questions(run), 1):
        link = f'<a href="#{place}">{question}</a>' if f'id="{place}"' in page else question
        rows.append(f'<li id="q{i}">{link} {escape(answer)}</li>')
    return section("questions", "Ten questions", f'<ol class="questions">{"".join(rows)}</ol>')


def _reward_of(info: dict[str, Any]) -> str:
    """Return the name of the reward, with the class of a classifier."""
    found, name = info.get("rewarded_class"), info["args"]["reward_fn"]
    return f"{name}, the class {found['label']}" if found else name


def _curves(run: Run) -> str:
    metrics = run.metrics()
    if not metrics:
        return section("curves", "Curves", "<p>No phase is done yet.</p>")
    by_name = [name for name in metrics[-1] if name.startswith(reward_metric(""))]
    title = "several rewards, before they are weighted"
    curves = [(name, unit, names.split()) for name, unit, names in REPORT_CURVES]
    curves[1:1] = [(title, "reward", by_name)] if by_name else []
    bands, n = sample_bands(run)
    records = [Snapshot(run, "", line) for line in metrics]
    figures = []
    for title, unit, names in curves:
        series = {name.replace("_", " "): name for name in names}
        picture = curves_over(records, title, series, unit, bands=bands)
        figure = f'<figure id="curve-{escape(names[0])}"'
        figures += [fragment(picture).replace("<figure", figure, 1)] if picture else []
    of = "the sequences" if n is None else f"the {n} sequences"
    note = f'<p class="note">Bands: 95 %, bootstrap over {of} of each phase.</p>'
    grid = f'<div class="figures">{"".join(figures)}</div>'
    return section("curves", "Curves", grid + note)


def samples_section(rows: Sequence[object]) -> str:
    """Return the table of samples, which the script fills."""
    if not rows:
        return section("samples", "Samples", "<p>Nothing is written yet.</p>")
    return section(
        "samples",
        "Samples",
        '<div id="tools" class="js" hidden><input id="find" type="search" placeholder="search" '
        'aria-label="search the samples"><label><input id="every" type="checkbox"> all phases'
        '</label><button id="selection">selection</button><span id="count" class="note"></span>'
        '</div><div class="scroll"><table id="samples-table"><thead></thead><tbody></tbody></table>'
        '</div><button id="more" hidden>more</button>',
    )


def probes_section(runs: Sequence[RunData]) -> str:
    """Return a fold per probe with places for the pictures of one run, or of two."""
    folds = []
    for name, kind in {name: kind for data in runs for name, kind in data.kinds.items()}.items():
        sides = "".join(
            f'<div class="side"><p class="note"></p><div class="at" data-side="{side}" '
            f'data-probe="{escape(name)}"></div></div>'
            for side in "ab"[: len(runs)]
        )
        question, about = _description(kind)
        folds.append(
            f'<details class="probe"><summary><h3>{escape(name)}</h3>{question}</summary>'
            f'<div id="{escape(name)}">{about}<div class="sides">{sides}</div></div></details>'
        )
    if not folds:
        folds.append(
            "<p>This run had no probes. Train with <code>--probes</code>, or attach some in "
            "Python: <code>attach(trainer, default_suite(trainer))</code> of "
            "<code>rlhf_lab.probes</code>.</p>"
        )
    notes = "".join(
        f"<li>phase {note['phase']}: {escape(note['probe'])}: {escape(note['note'])}</li>"
        for data in runs
        for note in data.run.notes()
    )
    note = f"<h3>Refused or switched off</h3><ul>{notes}</ul>" if notes else ""
    return section("probes", "Probes", "".join(folds) + note)


def _description(kind: str) -> tuple[str, str]:
    """Return the question of a probe of the package; what it records, and its caveat."""
    known = getattr(probes, kind, None)
    if not isinstance(known, type):
        return "", ""
    first = (inspect.getdoc(known) or "").partition("\n\n")[0].replace("`", "")
    question, caveat = getattr(known, "question", ""), getattr(known, "caveat", "")
    about = f"<p>{escape(first)}</p>" * bool(first)
    about += f'<p class="note">Caveat: {escape(caveat)}</p>' * bool(caveat)
    return f'<span class="note">{escape(question)}</span>' * bool(question), about


def _checks(run: Run) -> str:
    """Return each identity once, with its worst value over the phases."""
    found: dict[tuple[str, str], list[StoredCheck]] = {}
    for check in run.checks():
        found.setdefault((check.probe, check.name), []).append(check)
    if not found:
        return section("checks", "Identity checks", "<p>None ran.</p>")
    rows = []
    for key, checks in found.items():
        missed = [check for check in checks if not check.ok]
        worst = missed[-1] if missed else max(checks, key=lambda check: check.value)
        rows.append([*key, worst.value, worst.tolerance, len(checks), not missed])
    n = sum(not row[-1] for row in rows)
    note = f"{n} of {len(rows)} do not hold." if n else "All hold."
    columns = ["probe", "identity", "largest error", "tolerance", "times", "holds"]
    return section("checks", "Identity checks", _folded(note, html.table(columns, rows)))


def _folded(summary: str, content: str) -> str:
    return f'<details class="fold"><summary>{summary}</summary>{content}</details>'


def _returned(run: Run) -> str:
    """Return the last dicts that functions on events returned."""
    parts = [
        f"<h3>{escape(name)}</h3>{fragment(number_table(run.returned(name)))}"
        for name in run.functions()
    ]
    title = "Returned by functions on events"
    return section("returned", title, "".join(parts)) if parts else ""


def _arguments(run: Run) -> str:
    info = run.info
    rows = [[name, json.dumps(value)] for name, value in info["args"].items()]
    versions = ", ".join(f"{name} {number}" for name, number in info.get("versions", {}).items())
    table = _folded(f"{len(rows)} arguments", html.table(["argument", "value"], rows))
    return section("arguments", "Arguments", f"{table}<p>{escape(versions)}</p>")
