"""Trackio as a sink: wandb's API over a local database, without an account or a server."""

import contextlib
import io
from types import ModuleType

from rlhf_lab.config import RLHFArgs
from rlhf_lab.training.run_dir import RunDir
from rlhf_lab.training.sinks import Entry, Sink, entries_so_far
from rlhf_lab.training.wandb_sink import values_of


class TrackioSink(Sink):
    """Writes every phase to a local database that `trackio show` reads.

    It is in a folder of the user's or in TRACKIO_DIR. Records of probes are not sent.
    """

    __name__ = "trackio"

    def __init__(self, module: ModuleType) -> None:
        super().__init__()
        self._module, self._run = module, None

    def open(self, run: RunDir, args: RLHFArgs, phase: int) -> None:
        """Begin a run under the directory's name.

        Trackio would keep a phase that is done again twice: the earlier part of a run that goes on
        is deleted, and what the run's directory still holds of it is sent again.
        """
        info = run.read_info()
        project, earlier = args.wandb_project_name, info.get("trackio_id")
        with contextlib.redirect_stdout(io.StringIO()):
            self._run = self._module.init(
                project=project,
                name=run.path.name,
                group=args.wandb_group,
                config=args.to_dict(),
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        if earlier:
            self._delete(project, earlier)
        run.write_info(info | {"trackio_id": self._run.id})
        for entry in entries_so_far(run):
            self.send(entry)

    def _delete(self, project: str, run_id: str) -> None:
        """Delete a run of trackio's, if it is still there."""
        with contextlib.suppress(ValueError):
            for earlier in self._module.Api().runs(project):
                if earlier.id == run_id:
                    earlier.delete()

    def send(self, entry: Entry) -> None:
        """Send one phase; trackio writes it within a second."""
        self._run.log(values_of(entry, self._module), step=entry.phase)

    def add(self, entry: Entry) -> None:
        """Send the final evaluation as one more step, since trackio has no summary of a run."""
        if entry.is_final and entry.samples:
            self.send(entry)

    def close(self) -> None:
        """Wait until all is written, and close the run."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
