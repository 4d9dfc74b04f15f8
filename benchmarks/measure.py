"""The measurements: contestants timed in turn, results as plain numbers that can be stored."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.contestants import started
from benchmarks.flops import floor_seconds, phase_flops
from benchmarks.harness import Answer, interleave
from benchmarks.work import Work

BATCHES, LENGTHS = (8, 16, 32, 64), (25, 50, 100)
GENERATORS = ("ours-sampling", "hf-generate")
RUNS = ("ours-run", "ours-run-with-probes")

Figures = dict[str, Any]
Done = Callable[[str, int, Answer], None]


def floor(work: Work) -> Figures:
    """The operations of a phase, and the seconds that they alone take here."""
    return {"flops": phase_flops(work), "seconds": floor_seconds(work)}


def phases(
    names: Sequence[str],
    work: Work,
    repeats: int,
    model: Path,
    peers: Path | None,
    done: Done,
    warmups: int = 1,
) -> tuple[Figures, dict[str, str]]:
    """All answers of each contestant, and why some are left out."""
    with started(names, work, model, peers) as (contestants, left_out):
        answers = interleave(contestants, repeats, done, warmups)
        figures = {c.name: {**c.about, "phases": answers[c.name]} for c in contestants}
    return figures, left_out


def grown(work: Work) -> dict[str, list[Work]]:
    """The work at other batch sizes and at other lengths."""
    return {
        "batch_size": [replace(work, batch_size=batch) for batch in BATCHES],
        "gen_len": [replace(work, gen_len=length) for length in LENGTHS],
    }


def growth(work: Work, repeats: int, model: Path, done: Done) -> Figures:
    """This package alone at other batch sizes and lengths, one after another."""
    return {
        axis: [
            {axis: getattr(w, axis), **phases(["ours"], w, repeats, model, None, done)[0]["ours"]}
            for w in works
        ]
        for axis, works in grown(work).items()
    }


def generation(work: Work, repeats: int, model: Path, done: Done) -> Figures:
    """Sampling alone, this package's and Hugging Face's."""
    return phases(GENERATORS, work, repeats, model, None, done)[0]


def probes(work: Work, model: Path, done: Done) -> Figures:
    """A short run with the default probes, its end included, in turn with one without."""
    return phases(RUNS, work, work.run_turns, model, None, done, warmups=0)[0]
