"""Trackio, a local dashboard, as a mirror of what the run writes to its own directory."""

import contextlib
import io
from collections.abc import Iterator
from typing import Any

from rlhf_lab.config import RLHFArgs
from rlhf_lab.training.extras import import_extra
from rlhf_lab.training.run_dir import RunDir
from rlhf_lab.training.sinks.sink import COLUMNS, Entry, Sink, entries_so_far


class TrackioSink(Sink):
    """Writes to trackio's local database, which `trackio show` reads; no server is started.

    Trackio keeps the database in a folder of the user's, or in TRACKIO_DIR.

    Raises:
        ConfigError: the package trackio is not installed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._trackio = import_extra("trackio", "loggers='trackio'", "loggers")
        self._run: Any = None

    def open(self, run: RunDir, args: RLHFArgs, phase: int) -> None:
        """Begin a run under the directory's name, in the place of its earlier part if it has one.

        1. Begin a run, which also ends one of the same process that was left open.
        2. Delete the earlier part: trackio would keep a phase that is done again twice.
        3. Send what the run's directory still holds of it.
        """
        info, project = run.read_info(), args.wandb_project_name
        with _silent():
            self._run = self._trackio.init(
                project,
                name=run.path.name,
                config=args.to_dict(),
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        if "trackio_id" in info:
            self._delete(project, info["trackio_id"])
        run.write_info(info | {"trackio_id": self._run.id})
        for entry in entries_so_far(run):
            self.send(entry)

    def _delete(self, project: str, run_id: str) -> None:
        """Delete a run, if it is still there."""
        with contextlib.suppress(ValueError):
            for earlier in self._trackio.Api().runs(project):
                if earlier.id == run_id:
                    earlier.delete()

    def send(self, entry: Entry) -> None:
        """Hand one phase over; trackio writes it within a second."""
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in entry.samples]
        table = self._trackio.Table(data=rows)
        self._run.log({**entry.scalars, "samples": table}, step=entry.phase)

    def close(self) -> None:
        """Wait until all is written."""
        with _silent():
            self._run.finish()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep what trackio prints out of the run's own output."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
