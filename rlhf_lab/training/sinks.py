"""Sinks: loggers that a run's metrics and samples are sent to, besides its own directory."""

import contextlib
import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.training.callbacks import Callbacks, Context
from rlhf_lab.training.extras import import_extra
from rlhf_lab.training.rollout import SAMPLE_COLUMNS, sample_lines
from rlhf_lab.training.run_dir import METRICS, SAMPLES, RunDir

MARKS = {ord(mark): f"&#{ord(mark)};" for mark in "&<>|*_`~#[]()!\\-+\n"}
N_SAMPLES = 16


@dataclass(frozen=True)
class Entry:
    """One phase as a sink sees it.

    Args:
        phase: counted from 0; the step of a curve.
        scalars: the line of metrics.jsonl, what a phase cost under names such as
            cost/rollout_seconds, without what is not known.
        samples: the first 16 sequences, each a tuple of `SAMPLE_COLUMNS`.
    """

    phase: int
    scalars: dict[str, float]
    samples: list[tuple[Any, ...]]

    @classmethod
    def of(cls, line: dict[str, Any], samples: list[dict[str, Any]]) -> "Entry":
        """From a line of metrics.jsonl, and the lines of samples.jsonl that belong to it."""
        costs = {f"cost/{name}": value for name, value in line["cost"].items()}
        metrics = {k: v for k, v in line.items() if k not in ("phase", "cost") and v is not None}
        rows = [
            tuple(sample.get(name) for name in SAMPLE_COLUMNS) for sample in samples[:N_SAMPLES]
        ]
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
            samples = sample_lines(ctx.rollout, ctx.policy.base_model.tokenizer)
            self.send(Entry.of(ctx.report.to_dict(), samples))
        if ctx.event == "run_end":
            self._state = "closed"
            self.close()


class WandbSink(Sink):
    """Sends every phase's metrics, and a table of some of its samples, to wandb or to trackio.

    Trackio has wandb's API, and writes to a local database that `trackio show` reads, in a folder
    of the user's or in TRACKIO_DIR; no server is started.
    """

    def __init__(self, module: ModuleType) -> None:
        super().__init__()
        self.__name__ = module.__name__
        self._module, self._run = module, None

    def open(self, run: RunDir, args: RLHFArgs, phase: int) -> None:
        """Begin a run under the directory's name, or go on with its earlier part.

        wandb goes on under the old id, and takes each step once: a phase that is done again stays
        as it was. trackio would keep such a phase twice, so that the earlier part is deleted, and
        what the run's directory still holds of it is sent again.
        """
        info, noted = run.read_info(), f"{self.__name__}_id"
        is_trackio, earlier = self.__name__ == "trackio", info.get(noted)
        only_wandb = {
            "entity": args.wandb_entity,
            "id": earlier,
            "resume": "allow" if earlier else None,
            "mode": args.wandb_mode,
            "dir": str(run.path),
        }
        only_trackio = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        with contextlib.redirect_stdout(io.StringIO()):
            self._run = self._module.init(
                project=args.wandb_project_name,
                name=run.path.name,
                config=args.to_dict(),
                **(only_trackio if is_trackio else only_wandb),
            )
        if is_trackio and earlier:
            self._delete(args.wandb_project_name, earlier)
        run.write_info(info | {noted: self._run.id})
        for entry in entries_so_far(run) if is_trackio else ():
            self.send(entry)

    def _delete(self, project: str, run_id: str) -> None:
        """Delete a run of trackio's, if it is still there."""
        with contextlib.suppress(ValueError):
            for earlier in self._module.Api().runs(project):
                if earlier.id == run_id:
                    earlier.delete()

    def send(self, entry: Entry) -> None:
        """Send one phase; trackio writes it within a second."""
        rows = [list(row) for row in entry.samples]
        table = self._module.Table(columns=list(SAMPLE_COLUMNS), data=rows)
        self._run.log({**entry.scalars, "samples": table}, step=entry.phase)

    def close(self) -> None:
        """Wait until all is sent, and close the run."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()


class TensorBoardSink(Sink):
    """Writes event files to the folder tensorboard of the run's directory.

    Scalars keep their names and are of single precision, as TensorBoard stores them; the samples
    are a table under Text.
    """

    def __init__(self, module: ModuleType) -> None:
        super().__init__()
        self._module, self._writer = module, None

    def open(self, run: RunDir, args: RLHFArgs, phase: int) -> None:
        """Start an event file that takes the place of this phase and later ones in earlier files.

        The event file says so to its readers (purge_step); nothing is deleted.
        """
        self._writer = self._module.SummaryWriter(str(run.path / "tensorboard"), purge_step=phase)
        if phase == 0:
            fields = json.dumps(args.to_dict(), indent=2).splitlines()
            self._writer.add_text("args", "\n".join(f"    {line}" for line in fields), 0)

    def send(self, entry: Entry) -> None:
        """Write one phase to disk."""
        for name, value in entry.scalars.items():
            self._writer.add_scalar(name, value, entry.phase)
        self._writer.add_text("samples", _table(SAMPLE_COLUMNS, entry.samples), entry.phase)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def attach_sinks(args: RLHFArgs, callbacks: Callbacks) -> None:
    """Make the loggers of `args.loggers`, and wandb if `args.wandb_mode` says so; attach them.

    Raises:
        ConfigError: a logger's package is not installed, or wandb needs a login.
    """
    sinks: list[Sink] = [] if args.wandb_mode == "disabled" else [WandbSink(_wandb(args))]
    for name in args.logger_names:
        package = {"tensorboard": "torch.utils.tensorboard"}.get(name, name)
        module = import_extra(package, f"loggers={name!r}", "loggers")
        sinks.append({"tensorboard": TensorBoardSink, "trackio": WandbSink}[name](module))
    for sink in sinks:
        sink.attach(callbacks)


def _wandb(args: RLHFArgs) -> ModuleType:
    """The package wandb; refused at once without a login, so that no prompt for one ever waits."""
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    if args.wandb_mode == "online" and not wandb.login(prompt=False, verify=False):
        raise ConfigError(
            "wandb_mode='online' needs a login; run `wandb login`, set WANDB_API_KEY, "
            "or use wandb_mode='offline'."
        )
    return wandb


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows as a Markdown table, which shows every text as it stands."""
    lines = [head, ["---"] * len(head), *([_cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: str | float | int | None) -> str:
    """A value such that Markdown reads neither a mark nor the end of a cell in it."""
    if isinstance(value, str):
        return value.translate(MARKS)
    return "" if value is None else f"{value:.4g}"
