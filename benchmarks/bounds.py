"""The performance bounds of the package, and which of them are met."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Literal, NamedTuple

from benchmarks.command_times import FIRST_SAMPLES, HELP, MAIN_JOB
from benchmarks.records import Record
from benchmarks.sheet import Sheet
from benchmarks.summary import Row, floor_distance, growth_exponent, probe_cost, rows
from benchmarks.work import Work


class Bound(NamedTuple):
    """A bound on a figure of one shape in one precision.

    Args:
        measure: the figure of a stored result, or None where it was not measured.
    """

    shape: str
    precision: str
    what: str
    sense: Literal["at least", "at most"]
    limit: float
    measure: Callable[[Record], float | None]

    def row(self, results: Sequence[Record]) -> list[str]:
        """The figure's name, its bound, what was measured first, and whether the bound is met."""
        kind = {"shape": self.shape, "precision": self.precision}
        of_this = (r for r in results if kind.items() <= r["work"].items())
        measured = (self.measure(result) for result in of_this)
        value = next((figure for figure in measured if figure is not None), None)
        name = f"{self.shape}, {self.precision}: {self.what}"
        bound = f"{self.sense} {self.limit:g}"
        if value is None:
            return [name, bound, "not measured", ""]
        met = value >= self.limit if self.sense == "at least" else value <= self.limit
        return [name, bound, f"{value:.2f}", "yes" if met else "no"]


def bounds_sheet(results: Sequence[Record]) -> Sheet:
    """All bounds beside what was measured, met or not."""
    return Sheet(["figure", "bound", "measured", "met"], [bound.row(results) for bound in BOUNDS])


def _contestants(result: Record) -> dict[str, Row]:
    found = rows(result["contestants"], Work(**result["work"]).tokens)
    return {row.name: row for row in found}


def _times(name: str) -> Callable[[Record], float | None]:
    """How many times as long as this package a contestant takes."""

    def measure(result: Record) -> float | None:
        found = _contestants(result)
        return found[name].ratio if name in found else None

    return measure


def _generation(result: Record) -> float | None:
    if "generation" not in result:
        return None
    found = rows(result["generation"], Work(**result["work"]).tokens, "ours-sampling")
    return next(row.ratio for row in found if row.name == "hf-generate")


def _memory(bytes_per_weight: int) -> Callable[[Record], float | None]:
    """The share of naive's memory that this package takes, without so much for each weight."""

    def measure(result: Record) -> float | None:
        found = _contestants(result)
        if "naive" not in found:
            return None
        both = bytes_per_weight * Work(**result["work"]).size.n_trained
        ours, naive = (found[name].over_model_bytes - both for name in ("ours", "naive"))
        return ours / naive

    return measure


def _probe_share(result: Record) -> float | None:
    return probe_cost(result["probes"])[0] if "probes" in result else None


def _growth(axis: str, start: int) -> Callable[[Record], float | None]:
    """The exponent of growth along an axis, from `start` on."""

    def measure(result: Record) -> float | None:
        if "growth" not in result:
            return None
        return growth_exponent([m for m in result["growth"][axis] if m[axis] >= start], axis)

    return measure


def _command(name: str) -> Callable[[Record], float | None]:
    """The seconds of a command as a process of its own."""
    return lambda result: median(result["commands"][name]) if "commands" in result else None


GROWTH = (
    ("growth with the batch, exponent", "at most", 1.05, _growth("batch_size", 16)),
    ("growth with the length, exponent", "at most", 1.05, _growth("gen_len", 25)),
)
BOUNDS = (
    Bound("small", "fp32", "times faster than naive", "at least", 3.5, _times("naive")),
    Bound("small", "fp32", "times faster than trl-0.11.4", "at least", 2.7, _times("trl-0.11.4")),
    Bound("small", "fp32", "times faster than trl-1.12", "at least", 3.3, _times("trl-1.12")),
    Bound("small", "bf16", "times faster than naive in fp32", "at least", 5.0, _times("naive")),
    Bound("tiny", "fp32", "times faster than naive", "at least", 2.2, _times("naive")),
    Bound("tiny", "fp32", "times faster than trl-0.11.4", "at least", 1.9, _times("trl-0.11.4")),
    Bound("small", "fp32", "sampling, times faster than generate", "at least", 1.5, _generation),
    Bound(
        "small", "fp32", "peak memory over the models, share of naive", "at most", 0.35, _memory(0)
    ),
    Bound("small", "fp32", "the same without the optimiser's state", "at most", 0.35, _memory(12)),
    Bound("small", "fp32", "time over the arithmetic alone", "at most", 1.3, floor_distance),
    Bound("tiny", "fp32", "share that the default probes add", "at most", 0.1, _probe_share),
    Bound("small", "fp32", "share that the default probes add", "at most", 0.1, _probe_share),
    Bound("nano", "fp32", f"seconds of {HELP}", "at most", 1.0, _command(HELP)),
    Bound("nano", "fp32", f"seconds of {FIRST_SAMPLES}", "at most", 15.0, _command(FIRST_SAMPLES)),
    Bound("nano", "fp32", f"seconds of {MAIN_JOB}", "at most", 40.0, _command(MAIN_JOB)),
    *(Bound(shape, "fp32", *growth) for shape in ("tiny", "small") for growth in GROWTH),
)
