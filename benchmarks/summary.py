"""Summary statistics of stored timings: medians, ratios."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.records import Record


@dataclass(frozen=True)
class Row:
    """One contestant's medians.

    Args:
        seconds, rollout, learning: of a phase and its halves.
        fastest, slowest: of all phases.
        ratio: its seconds over this package's; None without this package beside it.
        tokens_per_second: generated tokens over the seconds of the phase.
        over_model_bytes: peak memory less what the loaded models took.
        stages: seconds of each stage that it can tell.
    """

    name: str
    seconds: float
    fastest: float
    slowest: float
    rollout: float
    learning: float
    ratio: float | None
    tokens_per_second: float
    peak_bytes: int
    over_model_bytes: int
    stages: dict[str, float]


def rows(figures: Record, tokens: int, base: str = "ours") -> list[Row]:
    """The medians of all contestants, with their ratio to `base`."""
    first = _median(figures[base]["phases"], "seconds") if base in figures else None
    return [_row(name, one, tokens, first) for name, one in figures.items()]


def _row(name: str, one: Record, tokens: int, first: float | None) -> Row:
    phases = one["phases"]
    seconds = _median(phases, "seconds")
    names = dict.fromkeys(stage for phase in phases for stage in phase["stages"])
    peak = max(phase["peak_bytes"] for phase in phases)
    return Row(
        name=name,
        seconds=seconds,
        fastest=min(phase["seconds"] for phase in phases),
        slowest=max(phase["seconds"] for phase in phases),
        rollout=_median(phases, "rollout"),
        learning=_median(phases, "learning"),
        ratio=None if first is None else seconds / first,
        tokens_per_second=tokens / seconds,
        peak_bytes=peak,
        over_model_bytes=peak - one["loaded_bytes"],
        stages={n: median(phase["stages"].get(n, 0.0) for phase in phases) for n in names},
    )


def _median(phases: Sequence[Record], name: str) -> float:
    return median(phase[name] for phase in phases)


def probe_cost(figures: Record) -> tuple[float, dict[str, float]]:
    """What the probes add, as a share of the run without them, and seconds of each over the run.

    The share is of the processor's seconds, which other programs on the machine change little; of
    those on the clock where a result has no others.
    """
    unit = "cpu_seconds" if "cpu_seconds" in figures["ours-run"]["phases"][0] else "seconds"
    plain, probed = (sum(p[unit] for p in one["phases"]) for one in figures.values())
    each: dict[str, float] = {}
    for phase in figures["ours-run-with-probes"]["phases"]:
        for stage, seconds in phase["stages"].items():
            name = stage.removeprefix("probes/")
            each[name] = each.get(name, 0.0) + seconds
    return probed / plain - 1, each
