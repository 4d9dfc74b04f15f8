"""The base of all loggers: what a sink is sent, formed once from a phase, and when it is sent."""

from dataclasses import dataclass
from typing import Any, Literal

from rlhf_lab.config import RLHFArgs
from rlhf_lab.training.callbacks import Callbacks, Context
from rlhf_lab.training.rollout import SAMPLE_COLUMNS, sample_lines
from rlhf_lab.training.run_dir import METRICS, SAMPLES, RunDir

N_SAMPLES = 16


@dataclass(frozen=True)
class Entry:
    """One phase as a sink sees it.

    Args:
        phase: counted from 0; the step of a curve.
        scalars: the line of metrics.jsonl, what a phase cost under names such as
            cost/rollout_seconds, without what is not known.
        samples: text, reward and gold reward (None where no truth is known) of the first 16
            sequences.
    """

    phase: int
    scalars: dict[str, float]
    samples: list[tuple[str, float, float | None]]

    @classmethod
    def of(cls, line: dict[str, Any], samples: list[dict[str, Any]]) -> "Entry":
        """From a line of metrics.jsonl, and the lines of samples.jsonl that belong to it."""
        costs = {f"cost/{name}": value for name, value in line["cost"].items()}
        metrics = {k: v for k, v in line.items() if k not in ("phase", "cost") and v is not None}
        rows = [tuple(sample[name] for name in SAMPLE_COLUMNS) for sample in samples[:N_SAMPLES]]
        return cls(line["phase"], metrics | costs, rows)


def entries_so_far(run: RunDir) -> list[Entry]:
    """What the run's directory holds, one entry per phase."""
    by_phase: dict[int, list[dict[str, Any]]] = {}
    for sample in run.read(SAMPLES):
        by_phase.setdefault(sample["phase"], []).append(sample)
    return [Entry.of(line, by_phase.get(line["phase"], [])) for line in run.read(METRICS)]


class Sink:
    """Sends a run's phases to one logger, and does nothing else.

    A logger is a subclass with `open`, `send` and `close`. What is in the run's directory is the
    record; a sink that fails is switched off with a warning, and the run goes on.
    """

    def __init__(self) -> None:
        self._state: Literal["new", "open", "closed"] = "new"

    def open(self, run: RunDir, args: RLHFArgs, phase: int) -> None:
        """Begin a log, or go on with that of an earlier part of the run.

        Args:
            run: its directory, where what is needed to find the log again can be noted.
            phase: the one to come; a log that has it or later ones drops them.
        """
        raise NotImplementedError

    def send(self, entry: Entry) -> None:
        """Add one phase to the log."""
        raise NotImplementedError

    def close(self) -> None:
        """Finish the log; it may be opened again."""
        raise NotImplementedError

    def attach(self, callbacks: Callbacks) -> None:
        """Be called when the run starts, after each phase, and when it ends."""
        for event in ("run_start", "after_phase", "run_end"):
            callbacks.on(event)(self)

    def __call__(self, ctx: Context) -> None:
        """Open, send or close, as the event asks; a run that goes on after its end is reopened."""
        if ctx.event == "run_start" or self._state == "closed":
            self.open(ctx.run, ctx.args, ctx.phase)
            self._state = "open"
        if self._state != "open":
            return
        if ctx.event == "after_phase":
            self.send(Entry.of(ctx.report.to_dict(), sample_lines(ctx.rollout)))
        if ctx.event == "run_end":
            self._state = "closed"
            self.close()
