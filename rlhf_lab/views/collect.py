"""Data of the page about runs: pictures per phase, samples, and numbers of tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_lab.console import visible
from rlhf_lab.probes import Run
from rlhf_lab.probes.store import FOLDER, records_file
from rlhf_lab.probes.text_heatmap import FIELDS
from rlhf_lab.training.report import reward_metric
from rlhf_lab.training.run_dir import METRICS, SAMPLES, reading
from rlhf_lab.views.answers import HACKED_GAP
from rlhf_lab.views.pictures import paragraph
from rlhf_lab.views.probe_pictures import phase_pictures, record_pictures
from rlhf_lab.views.records import masked, read_snapshots

LabeledRuns = Mapping[str, Run]  # by label
GAP = "reward − true reward"
# of every sample; others are several rewards, and metrics of a language
SAMPLE_FIELDS = "phase reward true_reward kl_per_sequence response_length text prompt response"


def label_runs(runs: Sequence[Run]) -> LabeledRuns:
    """Return runs by label; several have their number before their name."""
    labels = [f"{i} " * (len(runs) > 1) + visible(x.path.name) for i, x in enumerate(runs, 1)]
    return dict(zip(labels, runs, strict=True))


def page_data(runs: LabeledRuns) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw all probes, and return the header that the script reads first, and the blocks by id."""
    columns, rows = sample_rows(runs)
    phases, recorded, blocks, listed = {row[0] for row in rows}, set(), {"s": rows}, []
    for i, (label, run) in enumerate(runs.items()):
        with reading(run.path / METRICS):
            phases |= {line["phase"] for line in run.metrics()}
        records, overs = {}, blocks.setdefault(f"r{i}-over", {})
        with reading(run.path / FOLDER):
            tokens = collect_tokens(run)
            for name, kind in run.kinds().items():
                overs[name], by_phase = _probe_fragments(run, name, kind)
                records[name] = sorted(by_phase)
                for phase, pictures in by_phase.items():
                    blocks.setdefault(f"r{i}-p{phase}", {})[name] = pictures
        recorded |= {phase for found in records.values() for phase in found}
        blocks |= {f"r{i}-t{phase}": texts for phase, texts in tokens.items()}
        listed.append({"label": label, "records": records, "tokens": sorted(tokens)})
    header = {"phases": sorted(phases | recorded), "recorded": sorted(recorded), "runs": listed}
    return header | {"samples": {"columns": columns, "gap": GAP, "hacked": HACKED_GAP}}, blocks


def _probe_fragments(run: Run, name: str, kind: str) -> tuple[str, dict[int, str]]:
    """Return pictures of a probe over phases, and by phase, below the checks that failed."""
    records, by_phase = read_snapshots(run, name), {}
    failed = [check for check in run.checks() if check.probe == name and not check.ok]
    with reading(run.path / records_file(name)):
        for at in records:
            tags = [
                paragraph(f"Failed check: {check.name}", "failed")
                for check in failed
                if check.phase == at["phase"]
            ]
            parts = "".join(part.fragment for part in [*tags, *record_pictures(at)])
            phase = at["phase"]
            by_phase[phase] = by_phase.get(phase, "") + visible(parts)  # several events of a phase
        over = "".join(part.fragment for part in phase_pictures(kind, records))
    return visible(over), by_phase if any(by_phase.values()) else {}


def sample_rows(runs: LabeledRuns) -> tuple[list[str], list[list[Any]]]:
    """Return columns and rows of the table of all samples, without columns that are unknown."""
    found = {label: run.samples() for label, run in runs.items()}
    names = dict.fromkeys(x for samples in found.values() for sample in samples for x in sample)
    named = [name for name in names if name not in SAMPLE_FIELDS.split()]
    fields = {"phase": "phase", "run": "", "reward": "reward", "true reward": "true_reward"}
    fields |= {visible(name.removeprefix(reward_metric(""))): name for name in named}
    fields |= {GAP: "", "KL": "kl_per_sequence", "tokens": "response_length"}
    rows = []
    for label, run in runs.items():
        with reading(run.path / SAMPLES):
            for sample in found[label]:
                row = {name: _rounded(sample.get(field)) for name, field in fields.items()}
                if row["true reward"] is not None:
                    row[GAP] = round(sample["reward"] - sample["true_reward"], 4)
                row["run"] = label if len(runs) > 1 else None
                rows.append(row | {"text": visible(sample["text"])})
    columns = [name for name in (*fields, "text") if any(row[name] is not None for row in rows)]
    return columns or ["phase", "text"], [[row[name] for name in columns] for row in rows]


def _rounded(value: Any, digits: int = 4) -> Any:
    return round(value, digits) if isinstance(value, float) else value


def collect_tokens(run: Run) -> dict[int, dict[str, Any]]:
    """Return the texts of TextHeatmap by phase, with all numbers of their tokens."""
    found, name = {}, run.find_probe("TextHeatmap")
    for at in read_snapshots(run, name):
        start, columns = at["prefix_len"], {}
        for field in (*FIELDS, *sorted(name for name in at.tensors if name.startswith("true_"))):
            mask = "truth_mask" if field.startswith("true_") else "mask"
            label = field.replace("true_", "exact ").replace("_", " ")
            if rows := at.read(field)[0]:
                columns[label] = [
                    [_rounded(x, 5) for x in row] for row in masked(rows, at.read(mask)[0])
                ]
        tokens = [[visible(token) for token in row] for row in at["tokens"]]
        block = {"probe": name, "tokens": tokens, "start": start, "columns": columns}
        found[at["phase"]] = block | {"rewards": at["rewards"]}
    return found
