"""Callback that sends the numbers and pictures of probes to the loggers of a run."""

import math
from collections import Counter
from collections.abc import Sequence

from rlhf_lab.probes import Run
from rlhf_lab.training import Context, RLHFTrainer
from rlhf_lab.training.checkpoint import is_numbered
from rlhf_lab.training.sinks import Sink
from rlhf_lab.views.pictures import Picture
from rlhf_lab.views.probe_pictures import probe_pictures


class ProbeLogger:
    """Callback that sends numbers after each phase, and pictures in phases 0, 1, 2, 3, 5, 8, ...

    Those of the last weights follow at the end. Pictures are SVG, which only wandb shows.
    """

    def __init__(self, sinks: list[Sink], probes: Sequence[str]) -> None:
        self.sinks, self.probes = sinks, probes
        self._sent, self._drawn = Counter[str](), Counter[str]()

    def attach(self, trainer: RLHFTrainer) -> None:
        """Register the callback after those that are registered so far."""
        for event in ("run_start", "after_phase", "run_end"):
            trainer.on(event)(self)

    def __call__(self, ctx: Context) -> None:
        """Send the records since the last call; skip those of an earlier part of the run."""
        if ctx.run is None:
            return
        run, is_end, values = Run(ctx.run.path), ctx.event == "run_end", {}
        for name in (name for name in run.probes() if name in self.probes):
            records = run.records(name)
            if ctx.event == "run_start":
                self._sent[name] = sum(record["phase"] < ctx.phase for record in records)
                self._drawn[name] = self._sent[name]
                continue
            for record in records[self._sent[name] :]:
                numbers = {k: x for k, x in record.items() if type(x) in (int, float)}
                del numbers["phase"]
                values |= {f"probe/{name}/{k}": x for k, x in numbers.items() if math.isfinite(x)}
            self._sent[name] = len(records)
            if (is_end or is_numbered(ctx.phase)) and len(records) > self._drawn[name]:
                plots = [x for x in probe_pictures(run, name) if isinstance(x, Picture)]
                for number, plot in enumerate(plots, 1):
                    values[f"probe/{name}/picture_{number}"] = plot.svg, plot.alt
                self._drawn[name] = len(records)
        for sink in [sink for sink in self.sinks if values and sink.state == "open"]:
            sink.send(ctx.phase, values, is_end)
