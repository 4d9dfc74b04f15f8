"""Callback that sends the numbers and pictures of probes to the loggers of a run."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_lab.probes import Run
from rlhf_lab.training import Context, RLHFTrainer
from rlhf_lab.training.sinks import Sink
from rlhf_lab.views.probe_pictures import probe_plots


class ProbeLogger:
    """Callback that sends numbers after each phase, and pictures after 1, 2, 4, 8, ... phases.

    The records and pictures of the last weights follow at the end of the run. Pictures are SVG,
    which wandb shows and other loggers skip.

    Args:
        probes: the names of the probes whose records are sent.
    """

    def __init__(self, sinks: list[Sink], probes: Sequence[str]) -> None:
        self.sinks, self.probes = sinks, probes
        self._sent, self._drawn = Counter[str](), Counter[str]()

    def attach(self, trainer: RLHFTrainer) -> None:
        """Be called at the start, after phases, and at the end, after what is registered so far."""
        for event in ("run_start", "after_phase", "run_end"):
            trainer.on(event)(self)

    def __call__(self, ctx: Context) -> None:
        """Skip what an earlier part of the run sent; send what is new."""
        if ctx.run is None:
            return
        run = Run(ctx.run.path)
        names = [name for name in run.probes() if name in self.probes]
        if ctx.event == "run_start":
            self._sent.update({name: _count_before(run, name, ctx.phase) for name in names})
            return
        is_end, done = ctx.event == "run_end", ctx.phase + 1
        pictures = self._new_pictures(run, names) if is_end or done & (done - 1) == 0 else {}
        values = self._new_numbers(run, names) | pictures
        if values:
            for sink in self.sinks:
                sink.offer(ctx.phase, values, is_end)

    def _new_numbers(self, run: Run, names: Sequence[str]) -> dict[str, float]:
        """The numbers of all records that were not sent, the later ones over the earlier."""
        found: dict[str, float] = {}
        for name in names:
            records = run.records(name)
            for record in records[self._sent[name] :]:
                found |= {f"probe/{name}/{key}": value for key, value in _numbers(record)}
            self._sent[name] = len(records)
        return found

    def _new_pictures(self, run: Run, names: Sequence[str]) -> dict[str, tuple[Any, str]]:
        """Every picture of the probes that recorded since the last, and what it shows in words."""
        found: dict[str, tuple[Any, str]] = {}
        for name in names:
            n_records = len(run.records(name))
            if n_records > self._drawn[name]:
                for number, plot in enumerate(probe_plots(run, name), 1):
                    found[f"probe/{name}/picture_{number}"] = plot.svg, plot.alt
            self._drawn[name] = n_records
        return found


def _count_before(run: Run, name: str, phase: int) -> int:
    """How many records an earlier part of the run made, and sent."""
    return sum(record["phase"] < phase for record in run.records(name))


def _numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The plain numbers of a record, without its phase; lists and words stay in the store."""
    for key, value in record.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if key != "phase" and is_number and math.isfinite(value):
            yield key, value
