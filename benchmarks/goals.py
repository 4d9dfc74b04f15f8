"""The performance goals of the package, and how each is read from a stored result."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from benchmarks.command_times import FIRST_SAMPLES, HELP, MAIN_JOB
from benchmarks.summary import Row, Stored, floor_distance, growth_exponent, probe_cost, rows
from benchmarks.work import Shape, Work

WHY_NOT_MET = """\
Why some are not met: naive's own products run at the speed of this machine's BLAS, which on it is
nearer to oneDNN than the goals took for granted, so that the arithmetic alone bounds the ratio;
what is left above it at `small` is the softmaxes over the vocabulary, the copies of weights into
packed form at every step, and the optimiser's passes over memory. At `tiny` it is Python and the
start of small operations. Gradients and Adam's moments of all weights are most of the memory of
every contestant.
"""


class Goal(NamedTuple):
    """A bound on a figure of one shape in one precision.

    Args:
        is_least: whether the figure has to reach the bound; otherwise it may not exceed it.
        measure: the figure of a stored result, or None where it was not measured.
    """

    shape: str
    precision: str
    what: str
    is_least: bool
    bound: float
    measure: Callable[[Stored], float | None]

    def row(self, results: Sequence[Stored]) -> list[str]:
        """The goal, its bound, what was measured first, and whether it is met."""
        of_this = (r for r in results if _kind(r) == (self.shape, self.precision))
        measured = (self.measure(result) for result in of_this)
        value = next((figure for figure in measured if figure is not None), None)
        name = f"{self.shape}, {self.precision}: {self.what}"
        bound = f"at {'least' if self.is_least else 'most'} {self.bound:g}"
        if value is None:
            return [name, bound, "not measured", ""]
        met = value >= self.bound if self.is_least else value <= self.bound
        return [name, bound, f"{value:.2f}", "yes" if met else "no"]


def goal_rows(results: Sequence[Stored]) -> list[list[str]]:
    """All goals beside what was measured, met or not."""
    return [goal.row(results) for goal in GOALS]


def _kind(result: Stored) -> tuple[str, str]:
    return result["work"]["shape"], result["work"]["precision"]


def trained_weights(shape: Shape) -> int:
    """The weights of a HookedTransformer of this shape, embedding and unembedding apart."""
    return shape.n_parameters + shape.d_model * shape.d_vocab


def _contestants(result: Stored) -> dict[str, Row]:
    found = rows(result["contestants"], Work(**result["work"]).tokens)
    return {row.name: row for row in found}


def _times(name: str) -> Callable[[Stored], float | None]:
    """How many times as long as this package a contestant takes."""

    def measure(result: Stored) -> float | None:
        found = _contestants(result)
        return found[name].ratio if name in found else None

    return measure


def _generation(result: Stored) -> float | None:
    if "generation" not in result:
        return None
    found = rows(result["generation"], Work(**result["work"]).tokens, "ours-sampling")
    return next(row.ratio for row in found if row.name == "hf-generate")


def _memory(bytes_per_weight: int) -> Callable[[Stored], float | None]:
    """The share of naive's memory that this package takes, without so much for each weight."""

    def measure(result: Stored) -> float | None:
        found = _contestants(result)
        if "naive" not in found:
            return None
        both = bytes_per_weight * trained_weights(Work(**result["work"]).size)
        ours, naive = (found[name].over_model_bytes - both for name in ("ours", "naive"))
        return ours / naive

    return measure


def _probe_share(result: Stored) -> float | None:
    return probe_cost(result["probes"])[0] if "probes" in result else None


def _growth(axis: str, start: int) -> Callable[[Stored], float | None]:
    """The exponent of growth along an axis, from `start` on."""

    def measure(result: Stored) -> float | None:
        if "growth" not in result:
            return None
        return growth_exponent([m for m in result["growth"][axis] if m[axis] >= start], axis)

    return measure


def _command(name: str) -> Callable[[Stored], float | None]:
    """The seconds of a command as a process of its own."""
    return lambda result: median(result["commands"][name]) if "commands" in result else None


GROWTH = (
    ("growth with the batch, exponent", False, 1.05, _growth("batch_size", 16)),
    ("growth with the length, exponent", False, 1.05, _growth("gen_len", 25)),
)
GOALS = (
    Goal("small", "fp32", "times faster than naive", True, 3.5, _times("naive")),
    Goal("small", "fp32", "times faster than trl-0.11.4", True, 2.7, _times("trl-0.11.4")),
    Goal("small", "fp32", "times faster than trl-1.12", True, 3.3, _times("trl-1.12")),
    Goal("small", "bf16", "times faster than naive in fp32", True, 5.0, _times("naive")),
    Goal("tiny", "fp32", "times faster than naive", True, 2.2, _times("naive")),
    Goal("tiny", "fp32", "times faster than trl-0.11.4", True, 1.9, _times("trl-0.11.4")),
    Goal("small", "fp32", "sampling, times faster than generate", True, 1.5, _generation),
    Goal("small", "fp32", "peak memory over the models, share of naive", False, 0.35, _memory(0)),
    Goal("small", "fp32", "the same without the optimiser's state", False, 0.35, _memory(12)),
    Goal("small", "fp32", "time over the arithmetic alone", False, 1.3, floor_distance),
    Goal("tiny", "fp32", "share that the default probes add", False, 0.1, _probe_share),
    Goal("small", "fp32", "share that the default probes add", False, 0.1, _probe_share),
    Goal("nano", "fp32", f"seconds of {HELP}", False, 1.0, _command(HELP)),
    Goal("nano", "fp32", f"seconds of {FIRST_SAMPLES}", False, 15.0, _command(FIRST_SAMPLES)),
    Goal("nano", "fp32", f"seconds of {MAIN_JOB}", False, 40.0, _command(MAIN_JOB)),
    *(Goal(shape, "fp32", *growth) for shape in ("tiny", "small") for growth in GROWTH),
)
