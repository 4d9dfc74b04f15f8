"""Data of the page about a run: pictures per phase, samples, and which of them to show first."""

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from rlhf_lab.console import visible
from rlhf_lab.errors import RunError
from rlhf_lab.probes import Run
from rlhf_lab.probes.store import FOLDER
from rlhf_lab.training.report import reward_metric
from rlhf_lab.training.run_dir import METRICS, SAMPLES, reading
from rlhf_lab.views.html import failed_check, plain
from rlhf_lab.views.probe_pictures import draw_declared, fragment, in_grids, pictures_over
from rlhf_lab.views.records import Snapshot
from rlhf_lab.views.token_data import collect_tokens

MOST_RUNS = len(ascii_uppercase)
GAP = "reward − true reward"
SampleRows = list[list[Any]]


def pack(value: Any) -> str:
    """Return JSON, compressed, as base64."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def probe_fragments(run: Run, name: str, kind: str) -> tuple[str, dict[int, str]]:
    """Return the pictures of a probe over phases, and those of each record by phase.

    Failed checks come first in their phase.
    """
    records = [Snapshot(run, name, record) for record in run.records(name)]
    failed: dict[int, list[str]] = {}
    for check in run.checks():
        if check.probe == name and not check.ok:
            failed.setdefault(check.phase, []).append(check.name)
    over = plain(in_grids(map(fragment, pictures_over(name, kind, records))))
    by_phase: dict[int, str] = {}
    for at in records:
        phase = at.record["phase"]
        tags = map(failed_check, failed.get(phase, ()))
        pictures = plain(in_grids([*tags, *map(fragment, draw_declared(name, kind, at))]))
        by_phase[phase] = by_phase.get(phase, "") + pictures  # several events of one phase
    return over, by_phase if any(by_phase.values()) else {}


def sample_rows(run: Run) -> tuple[list[str], SampleRows]:
    """Return the columns of the table of all samples, and its rows; unknown columns are left out.

    The first column is the phase, the last one the text.
    """
    samples = run.samples()
    named = [name for name in samples[-1] if name.startswith(reward_metric(""))] if samples else []
    fields = {"phase": "phase", "reward": "reward", "true reward": "true_reward"}
    fields |= {name.removeprefix(reward_metric("")): name for name in named}
    fields |= {GAP: "", "KL": "kl_per_sequence", "tokens": "response_length"}
    rows = []
    with reading(run.path / SAMPLES):
        for sample in samples:
            row = [_rounded(sample.get(field)) for field in fields.values()]
            if row[2] is not None:
                row[list(fields).index(GAP)] = round(sample["reward"] - sample["true_reward"], 4)
            rows.append([*row, visible(sample["text"])])
    known = [i for i in range(len(fields)) if any(row[i] is not None for row in rows)]
    columns = [visible(name) for name in fields]
    kept = [*known, len(fields)]
    return [[*columns, "text"][i] for i in kept], [[row[i] for i in kept] for row in rows]


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


@dataclass(frozen=True)
class RunData:
    """Data and drawings of one run for the page.

    `kinds` has the class of each probe; `drawn` its pictures over phases, and by phase; `tokens`
    the stored texts by phase. No other run of the page has the same label.
    """

    run: Run
    label: str
    columns: list[str]
    rows: SampleRows
    kinds: dict[str, str]
    drawn: dict[str, tuple[str, dict[int, str]]]
    tokens: dict[int, dict[str, Any]]


def collect_run(run: Run, label: str = "") -> RunData:
    """Read a run, and draw its probes.

    Raises:
        RunError: If a file of the run is damaged.
    """
    columns, rows = sample_rows(run)
    with reading(run.path / FOLDER):
        kinds = run.kinds()
        drawn = {name: probe_fragments(run, name, kind) for name, kind in kinds.items()}
        tokens = collect_tokens(run)
    return RunData(run, label or visible(run.path.name), columns, rows, kinds, drawn, tokens)


def collect_runs(runs: Sequence[Run]) -> list[RunData]:
    """Read several runs, which get the letters A, B, ... before their names.

    Raises:
        RunError: If a file of a run is damaged, or there are more runs than letters.
    """
    if len(runs) > MOST_RUNS:
        raise RunError(f"{len(runs)} runs do not fit on one page. Choose at most {MOST_RUNS}.")
    letters = zip(ascii_uppercase, runs, strict=False)
    return [collect_run(run, f"{letter} {visible(run.path.name)}") for letter, run in letters]


def page_data(runs: Sequence[RunData]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the header that the script of the page reads first, and the blocks by id."""
    columns, rows = merge_samples(runs)
    phases, recorded, blocks, listed = set(), set(), {"s": rows}, []
    for i, data in enumerate(runs):
        with reading(data.run.path / SAMPLES):
            phases |= {row[0] for row in data.rows}
        with reading(data.run.path / METRICS):
            phases |= {line["phase"] for line in data.run.metrics()}
        records = {name: sorted(by_phase) for name, (_, by_phase) in data.drawn.items()}
        listed.append({"label": data.label, "records": records, "tokens": sorted(data.tokens)})
        blocks |= {f"r{i}-t{phase}": texts for phase, texts in data.tokens.items()}
        recorded |= {phase for found in records.values() for phase in found}
        blocks[f"r{i}-over"] = {name: over for name, (over, _) in data.drawn.items()}
        for name, (_, by_phase) in data.drawn.items():
            for phase, pictures in by_phase.items():
                blocks.setdefault(f"r{i}-p{phase}", {})[name] = pictures
    header = {"phases": sorted(phases | recorded), "recorded": sorted(recorded), "runs": listed}
    return header | {"samples": {"columns": columns, "gap": GAP}}, blocks


def merge_samples(runs: Sequence[RunData]) -> tuple[list[str], SampleRows]:
    """Return columns and rows of the samples of all runs; of several, with the run's label."""
    if len(runs) == 1:
        return runs[0].columns, runs[0].rows
    names = list(dict.fromkeys(name for data in runs for name in data.columns[1:-1]))
    rows: SampleRows = []
    for data in runs:
        for row in data.rows:
            values = dict(zip(data.columns, row, strict=True))
            rows.append([row[0], data.label, *map(values.get, names), row[-1]])
    return ["phase", "run", *names, "text"], rows
