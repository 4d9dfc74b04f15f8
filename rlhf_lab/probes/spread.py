"""Finished runs with several seeds, and the mean and range of any number over them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rlhf_lab.probes.run import Run, select_phase

Metrics = Mapping[str, Any]


@dataclass(frozen=True)
class Spread:
    """A number over several seeds."""

    values: tuple[float, ...]  # one per seed

    @property
    def mean(self) -> float:
        """Mean over the seeds; nan if a value is."""
        return fmean(self.values)

    @property
    def low(self) -> float:
        """Minimum over the seeds; nan if a value is."""
        return math.nan if math.isnan(self.mean) else min(self.values)

    @property
    def high(self) -> float:
        """Maximum over the seeds; nan if a value is."""
        return math.nan if math.isnan(self.mean) else max(self.values)

    def __str__(self) -> str:
        n = len(self.values)
        seeds = f"{n} seed{'s' * (n > 1)}"
        return f"{self.mean:.3g} ({self.low:.3g} to {self.high:.3g}, {seeds})"


class Runs(list[Run]):
    """Finished runs that differ only in their seed, in the order of their seeds."""

    @property
    def seeds(self) -> list[int]:
        """The seed of each run."""
        return [run.args.seed for run in self]

    def metrics(self, phase: int = -1) -> dict[str, Spread]:
        """Return every metric of a phase by name, over the seeds; phase -1 is the last."""
        return _spreads([select_phase(run.metrics(), phase, "metrics", run)[-1] for run in self])

    def final(self) -> dict[str, Spread]:
        """Return every metric of fresh samples of the trained policies by name, over the seeds."""
        return _spreads([run.info["final"] for run in self])

    def record(self, probe: str, phase: int = -1) -> dict[str, Spread]:
        """Return every number that a probe recorded in a phase, over the seeds.

        Numbers in lists and objects are named by path, such as `accuracy.2`; phase -1 is the last.

        Raises:
            RunError: If the probe has no records, or none of that phase.
        """
        return _spreads([select_phase(run.records(probe), phase, probe, run)[-1] for run in self])


def named_leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values in nested lists and mappings by path, such as `accuracy.2`."""
    if not isinstance(value, Mapping | list | tuple):
        return {prefix: value}
    entries = value.items() if isinstance(value, Mapping) else enumerate(value)
    named = ((f"{prefix}.{name}" if prefix else str(name), entry) for name, entry in entries)
    return {leaf: v for name, entry in named for leaf, v in named_leaves(entry, name).items()}


def _spreads(records: Sequence[Metrics]) -> dict[str, Spread]:
    leaves = [named_leaves(record) for record in records]
    spreads = {}
    for name in leaves[0]:
        values = [each.get(name, "missing") for each in leaves]
        numbers = [math.nan if value is None else value for value in values]
        if any(value is not None for value in values) and {*map(type, numbers)} <= {int, float}:
            spreads[name] = Spread(tuple(map(float, numbers)))
    return spreads
