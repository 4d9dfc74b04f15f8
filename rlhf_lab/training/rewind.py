"""Rewinding a run's files to the phase that it goes on from, and mending what was written twice."""

import warnings
from typing import Any

from rlhf_lab.files import clear_draft
from rlhf_lab.training.run_dir import METRICS, RETURNED, SAMPLES, RunDir, json_lines, replacing


def rewind(run: RunDir, phase: int, batch_size: int) -> None:
    """Drop what was logged from this phase on, which is about to be done again.

    A checkpoint that was being written when the run was killed goes, too.

    Args:
        batch_size: samples that the run has of each phase.

    Raises:
        RunError: a file of the run cannot be read, or replaced.
    """
    for partial in run.checkpoints.glob(".*.partial"):
        clear_draft(partial)
    returned = [f"{RETURNED}/{path.name}" for path in run.path.glob(f"{RETURNED}/*.jsonl")]
    for file in (METRICS, SAMPLES, *returned):
        run.keep(file, lambda record: _is_done(record, phase))
    _mend_metrics(run, phase)
    _mend_samples(run, phase, batch_size)


def _mend_metrics(run: RunDir, phase: int) -> None:
    """Put one line for each phase before this one in order; say what was doubled or lacks."""
    lines = run.read(METRICS)
    first = {line["phase"]: line for line in reversed(lines)}
    kept = [first[number] for number in sorted(first)]
    if kept != lines:
        warnings.warn(
            f"{run.path / METRICS} had phases twice or out of order, as when two trainers "
            "write at once; the first line of each phase stays.",
            stacklevel=2,
        )
        with replacing(run.path / METRICS) as partial:
            partial.write_text(json_lines(kept), encoding="utf-8")
    lacking = [str(number) for number in range(phase) if number not in first]
    if lacking:
        warnings.warn(
            f"{run.path / METRICS} lacks phase {', '.join(lacking)}, which the run has done; "
            "the run goes on from its weights, and its curves have a gap.",
            stacklevel=2,
        )


def _mend_samples(run: RunDir, phase: int, batch_size: int) -> None:
    """Put the samples in the order of their phases, each batch once; say what lacks."""
    lines, kept, odd = run.read(SAMPLES), [], []
    by_phase: dict[int, list[dict[str, Any]]] = {number: [] for number in range(phase)}
    for line in lines:
        by_phase[line["phase"]].append(line)
    for number, found in by_phase.items():
        if found[:batch_size] == found[batch_size:]:  # two trainers wrote the same batch
            found = found[:batch_size]
        if len(found) != batch_size:
            odd.append(f"{len(found)} samples of phase {number}")
        kept += found
    if kept != lines:
        warnings.warn(
            f"{run.path / SAMPLES} had samples twice or out of order, as when two trainers "
            "write at once; each batch stays once, in the order of phases.",
            stacklevel=2,
        )
        with replacing(run.path / SAMPLES) as partial:
            partial.write_text(json_lines(kept), encoding="utf-8")
    if odd:
        warnings.warn(
            f"{run.path / SAMPLES} has {', '.join(odd)}, and the run wrote {batch_size} in "
            "each; it goes on from its weights, and what is there stays.",
            stacklevel=2,
        )


def _is_done(record: dict[str, Any], phase: int) -> bool:
    """Whether what a record tells of is behind a run that goes on at this phase.

    The checkpoint that a run goes on from bears the number of the phase to come; the best one is
    saved within its phase, and those of phase 0 are saved again.
    """
    if record["phase"] == phase > 0:
        return record.get("checkpoint", "best") != "best"
    return record["phase"] < phase
