"""Data of the page about a run: pictures per phase, samples, and which of them to show first."""

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from rlhf_lab.console import visible
from rlhf_lab.probes import Run
from rlhf_lab.training.report import reward_metric
from rlhf_lab.training.run_dir import SAMPLES, reading
from rlhf_lab.views.declared import Snapshot
from rlhf_lab.views.html import plain
from rlhf_lab.views.probe_pictures import draw_declared, fragment, pictures_over

GAP = "reward − true reward"
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
LARGEST_GAPS = 3
SampleRows = list[list[Any]]


def pack(value: Any) -> str:
    """Return JSON, compressed, as base64."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def probe_kinds(run: Run) -> dict[str, str]:
    """Return the class of each probe with records, by name, in the order of the suite."""
    names = run.probes()
    listed = run.store.read_suite()["probes"]
    return {probe["name"]: probe["kind"] for probe in listed if probe["name"] in names}


def probe_fragments(run: Run, name: str, kind: str) -> tuple[str, dict[int, str]]:
    """Return the pictures of a probe over phases, and those of each record by phase.

    Failed checks come first in their phase.
    """
    records = [Snapshot(run, name, record) for record in run.records(name)]
    failed: dict[int, list[str]] = {}
    for check in run.checks():
        if check.probe == name and not check.ok:
            failed.setdefault(check.phase, []).append(check.name)
    over = in_grids(map(fragment, pictures_over(name, kind, records)))
    by_phase: dict[int, str] = {}
    for at in records:
        phase = at.record["phase"]
        tags = [f'<p class="failed">Failed check: {escape(x)}</p>' for x in failed.get(phase, ())]
        pictures = in_grids([*tags, *map(fragment, draw_declared(name, kind, at))])
        by_phase[phase] = by_phase.get(phase, "") + pictures  # several events of one phase
    return over, by_phase if any(by_phase.values()) else {}


def in_grids(fragments: Iterable[str]) -> str:
    """Join fragments; neighboring drawings share a grid."""
    parts = []
    for is_drawn, group in groupby(map(plain, fragments), key=lambda x: x.startswith("<figure")):
        part = "".join(group)
        parts.append(f'<div class="figures">{part}</div>' if is_drawn else part)
    return "".join(parts)


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


def sample_picks(columns: Sequence[str], rows: SampleRows) -> dict[int, list[int]]:
    """Return the rows of each phase to show first: extremes, then quantiles of the reward.

    The extremes are the largest gaps between reward and true reward, or the largest KLs where the
    true reward is not known.
    """
    by_phase: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        by_phase.setdefault(row[0], []).append(i)
    column = {name: i for i, name in enumerate(columns)}
    size = lambda i, name: rows[i][column[name]] or 0.0 if name in column else 0.0
    extreme = GAP if GAP in column else "KL"
    picks = {}
    for phase, there in by_phase.items():
        ranked = sorted(there, key=lambda i: (size(i, "reward"), size(i, "KL")))
        largest = sorted(there, key=lambda i: -size(i, extreme))[:LARGEST_GAPS]
        quantiles = [ranked[round(q * (len(ranked) - 1))] for q in QUANTILES]
        picks[phase] = list(dict.fromkeys(largest * (extreme in column) + quantiles))
    return picks


def phase_blocks(by_probe: Mapping[str, Mapping[int, str]]) -> dict[str, dict[str, str]]:
    """Return the pictures of all probes, one block per phase."""
    blocks: dict[str, dict[str, str]] = {}
    for name, by_phase in by_probe.items():
        for phase, pictures in by_phase.items():
            blocks.setdefault(f"p-{phase}", {})[name] = pictures
    return blocks
