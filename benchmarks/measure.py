"""The measurements: contestants timed in turn, results as plain numbers that can be stored."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.contestants import started
from benchmarks.harness import interleave
from benchmarks.work import Work

GENERATORS = ("ours-sampling", "hf-generate")
RUNS = ("ours-run", "ours-run-with-probes")

Figures = dict[str, Any]


def phases(
    names: Sequence[str],
    work: Work,
    repeats: int,
    model: Path,
    peers: Path | None,
    warmups: int = 1,
) -> tuple[Figures, dict[str, str]]:
    """All answers of each contestant, and why some are left out."""
    with started(names, work, model, peers) as (contestants, left_out):
        answers = interleave(contestants, repeats, warmups)
        figures = {c.name: {**c.about, "phases": answers[c.name]} for c in contestants}
    return figures, left_out


def generation(work: Work, repeats: int, model: Path) -> Figures:
    """Sampling alone, this package's and Hugging Face's."""
    return phases(GENERATORS, work, repeats, model, None)[0]


def probes(work: Work, model: Path) -> Figures:
    """A short run with the default probes, its end included, in turn with one without."""
    return phases(RUNS, work, work.run_turns, model, None, warmups=0)[0]
