"""Sinks: loggers that a run's metrics and samples are sent to, besides its own directory."""

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rlhf_lab.config import RLHFArgs
from rlhf_lab.console import INTERRUPTED
from rlhf_lab.training.callbacks import Callbacks, Context
from rlhf_lab.training.rollout import SAMPLE_COLUMNS, sample_lines
from rlhf_lab.training.run_dir import METRICS, SAMPLES, RunDir

if TYPE_CHECKING:
    from PIL.Image import Image

N_SAMPLES = 16
FINAL, FINAL_SAMPLES = "final/", "final_samples"
"""What stands before the name of a figure of the final evaluation; the table of its samples."""


@dataclass(frozen=True)
class Entry:
    """One phase as a sink sees it, or what is added to one.

    Args:
        phase: counted from 0; the step of a curve.
        scalars: the line of metrics.jsonl, what a phase cost under names such as
            cost/rollout_seconds, without what is not known.
        samples: the first 16 sequences, each a tuple of `columns`.
        columns: `SAMPLE_COLUMNS`, and each of several rewards.
        pictures: each with its caption, by name.
        is_final: found at the end of the run, of the weights after `phase` learning phases.
    """

    phase: int
    scalars: dict[str, float]
    samples: list[tuple[Any, ...]] = field(default_factory=list)
    pictures: dict[str, tuple["Image", str]] = field(default_factory=dict)
    is_final: bool = False
    columns: tuple[str, ...] = SAMPLE_COLUMNS

    @classmethod
    def of(cls, line: dict[str, Any], samples: list[dict[str, Any]]) -> "Entry":
        """From a line of metrics.jsonl, and the lines of samples.jsonl that belong to it."""
        costs = {f"cost/{name}": value for name, value in line["cost"].items()}
        metrics = {k: v for k, v in line.items() if k not in ("phase", "cost") and v is not None}
        columns, rows = _table_of(samples)
        return cls(line["phase"], metrics | costs, rows, columns=columns)

    @property
    def table_name(self) -> str:
        """What the table of the samples is called."""
        return FINAL_SAMPLES if self.is_final else "samples"

    @classmethod
    def of_end(cls, run: RunDir) -> "Entry | None":
        """The final evaluation of a finished run, and what the policy wrote in it, if it had one.

        The figures are those of run.json, each under its name there behind final/.
        """
        info = run.read_info()
        if info.get("status") != "finished" or not info.get("final"):
            return None
        phase = info["phases_done"]
        figures = {FINAL + k: value for k, value in info["final"].items() if value is not None}
        samples = [sample for sample in run.read(SAMPLES) if sample["phase"] == phase]
        columns, rows = _table_of(samples)
        return cls(phase, figures, rows, is_final=True, columns=columns)


def _table_of(samples: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """The names of the columns, and the first lines of samples.jsonl in them.

    Runs of earlier versions have fewer of them.
    """
    rewards = [name for name in (samples[0] if samples else {}) if name.startswith("reward/")]
    columns = (*SAMPLE_COLUMNS, *rewards)
    return columns, [tuple(sample.get(name) for name in columns) for sample in samples[:N_SAMPLES]]


def entries_so_far(run: RunDir) -> list[Entry]:
    """What the run's directory holds, one entry per phase."""
    by_phase: dict[int, list[dict[str, Any]]] = {}
    for sample in run.read(SAMPLES):
        by_phase.setdefault(sample["phase"], []).append(sample)
    return [Entry.of(line, by_phase.get(line["phase"], [])) for line in run.read(METRICS)]


class Sink:
    """Sends a run's phases to one logger, and does nothing else.

    A logger is a subclass with `open`, `send` and `close`, and with `add` if it is to have the
    final figures and what probes record. What is in the run's directory is the record; a sink that
    fails is switched off with a warning, and the run goes on.

    Attributes:
        exit_code: how the run ended, there for `close`: 0 when it is finished, 130 when it was
            stopped before its last phase, 1 after an error.
    """

    def __init__(self) -> None:
        self._state: Literal["new", "open", "closed"] = "new"
        self._adds = True
        self.exit_code = 0

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

    def add(self, entry: Entry) -> None:
        """Add to the phase that was sent last, or to the whole run if `entry.is_final`.

        Nothing is done by a logger that has no use for it.
        """

    def complete(self, phase: int) -> None:
        """Write what was sent of a phase: all other callbacks have seen it, and more follow it.

        Nothing is done by a logger that writes at once.
        """

    def close(self) -> None:
        """Finish the log; it may be opened again."""
        raise NotImplementedError

    def attach(self, callbacks: Callbacks) -> None:
        """Be called when the run starts, after each phase, and when all others saw its end."""
        for event in ("run_start", "after_phase"):
            callbacks.on(event)(self)
        callbacks.on("after_phase", last=True)(self._complete)
        callbacks.on("run_end", last=True)(self)

    def __call__(self, ctx: Context) -> None:
        """Open, send or close, as the event asks; a run that goes on after its end is reopened."""
        if ctx.event == "run_start" or self._state == "closed":
            self.open(ctx.run, ctx.args, ctx.phase)
            self._state = "open"
        if self._state != "open":
            return
        if ctx.event == "after_phase":
            samples = sample_lines(ctx.rollout, ctx.policy.base_model.tokenizer)
            self.send(Entry.of(ctx.report.to_dict(), samples))
        if ctx.event == "run_end":
            self._end(ctx.run)

    def offer(self, entry: Entry) -> None:
        """Add something that is found beside the phases; what fails is not tried again."""
        if self._state != "open" or not self._adds:
            return
        try:
            self.add(entry)
        except Exception as error:
            self._adds = False
            self._warn("adding", error)

    def _complete(self, ctx: Context) -> None:
        """Leave the last phase open for what is found at the end of the run."""
        if self._state == "open" and ctx.phase + 1 < ctx.args.total_phases:
            self.complete(ctx.phase)

    def _end(self, run: RunDir) -> None:
        """Add the final evaluation, and close the log."""
        final = Entry.of_end(run)
        if final is not None:
            self.offer(final)
        self._close(0 if run.read_info().get("status") == "finished" else INTERRUPTED)

    def break_off(self, error: BaseException) -> None:
        """Close the log of a run that an error ended."""
        if self._state != "open":
            return
        try:
            self._close(INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)
        except Exception as second:
            self._warn("closing", second)

    def _close(self, exit_code: int) -> None:
        self._state, self.exit_code = "closed", exit_code
        self.close()

    def _warn(self, doing: str, error: Exception) -> None:
        name = getattr(self, "__name__", type(self).__name__)
        warnings.warn(f"{name} raised {type(error).__name__} in {doing}: {error}", stacklevel=2)
