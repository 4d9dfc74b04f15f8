"""TensorBoard as a sink: event files with scalars, samples as text, and pictures."""

import json
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from rlhf_lab.config import RLHFArgs
from rlhf_lab.training.run_dir import RunDir
from rlhf_lab.training.sinks import Entry, Sink

MARKS = {ord(mark): f"&#{ord(mark)};" for mark in "&<>|*_`~#[]()!\\-+\n"}


class TensorBoardSink(Sink):
    """Writes event files to the folder tensorboard of the run's directory.

    Scalars keep their names and are of single precision, as TensorBoard stores them; the samples
    are a table under Text, pictures are under Images.
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
        if entry.samples:
            table = _table(entry.columns, entry.samples)
            self._writer.add_text(entry.table_name, table, entry.phase)
        for name, (picture, _) in entry.pictures.items():
            pixels = np.asarray(picture.convert("RGB"))
            self._writer.add_image(name, pixels, entry.phase, dataformats="HWC")
        self._writer.flush()

    def add(self, entry: Entry) -> None:
        """Write it at the step of its phase."""
        self.send(entry)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows as a Markdown table, which shows every text as it stands."""
    lines = [head, ["---"] * len(head), *([_cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: str | float | int | None) -> str:
    """A value such that Markdown reads neither a mark nor the end of a cell in it."""
    if isinstance(value, str):
        return value.translate(MARKS)
    return "" if value is None else f"{value:.4g}"
