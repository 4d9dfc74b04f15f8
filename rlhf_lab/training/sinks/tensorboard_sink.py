"""TensorBoard as a mirror of what the run writes to its own directory."""

import json
from collections.abc import Iterable
from typing import Any

from rlhf_lab.config import RLHFArgs
from rlhf_lab.training.extras import import_extra
from rlhf_lab.training.run_dir import RunDir
from rlhf_lab.training.sinks.sink import COLUMNS, Entry, Sink

DIRECTORY = "tensorboard"


class TensorBoardSink(Sink):
    """Writes event files to the folder tensorboard of the run's directory.

    Scalars keep their names and are of single precision, as TensorBoard stores them; the samples
    are a table under Text.

    Raises:
        ConfigError: the package tensorboard is not installed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._module = import_extra("torch.utils.tensorboard", "loggers='tensorboard'", "loggers")
        self._writer: Any = None

    def open(self, run: RunDir, args: RLHFArgs, phase: int) -> None:
        """Start an event file that takes the place of this phase and later ones in earlier files.

        The event file says so to its readers (purge_step); nothing is deleted.
        """
        self._writer = self._module.SummaryWriter(str(run.path / DIRECTORY), purge_step=phase)
        if phase == 0:
            fields = json.dumps(args.to_dict(), indent=2).splitlines()
            self._writer.add_text("args", "\n".join(f"    {line}" for line in fields), 0)

    def send(self, entry: Entry) -> None:
        """Write one phase to disk."""
        for name, value in entry.scalars.items():
            self._writer.add_scalar(name, value, entry.phase)
        self._writer.add_text("samples", _table(COLUMNS, entry.samples), entry.phase)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def _table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Rows as a Markdown table, which shows every text as it stands."""
    head = list(columns)
    lines = [head, ["---"] * len(head), *([_cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: str | float | None) -> str:
    """A value such that Markdown reads neither a mark nor the end of a cell in it."""
    if not isinstance(value, str):
        return "" if value is None else f"{value:.4g}"
    marks = {ord(mark): f"&#{ord(mark)};" for mark in "&<>|*_`~#[]()!\\-+\n"}
    return value.translate(marks)
