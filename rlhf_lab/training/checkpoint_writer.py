"""The checkpoint writer: a background thread that writes copies of the state while the run goes on.

A copy is needed because the optimizer changes weights and moments in place.
"""

import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_lab.training.checkpoint import save_checkpoint


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint that is yet to be written.

    Args:
        path: is made absolute, since the working directory may change before it is written.
        tensors: copies in host memory; see `copied_to_host`.
        then: called in the thread once the file is whole.
    """

    path: Path
    tensors: dict[str, Tensor]
    notes: dict[str, Any]
    then: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", self.path.absolute())


def copied_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies in host memory, which later steps leave as they are.

    From CUDA they go into pinned memory, all queued before the host waits once.
    """
    copies = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():
        copies[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)
    return copies


class CheckpointWriter:
    """Writes snapshots in a thread of their own, in the order given, while the run goes on.

    There are never two jobs: `save` waits for the one before. A caller that waits before it copies
    therefore holds one copy of the state at a time, 12 bytes per weight with AdamW, besides the
    best weights: 4 bytes per weight of those that wait, and 4 more while earlier ones are written.
    A snapshot's memory is free as soon as its file is whole.

    The thread is no daemon: a process that ends by itself writes to the end first. One that is
    killed leaves the older files whole, since each is written beside the old one and renamed. An
    error is raised by the next `wait` or `save`, in the run's own thread; one without a later wait
    is a warning when the process ends.
    """

    def __init__(self) -> None:
        self._job: _Job | None = None
        self._errors: list[Exception] = []
        weakref.finalize(self, _warn_of, self._errors)

    def save(self, snapshots: Sequence[Snapshot]) -> None:
        """Begin to write snapshots of one directory, when what was begun before is written.

        Raises:
            RunError: what was begun before could not be written, and these are not.
        """
        self.wait()
        if snapshots:
            self._job = _Job(deque(snapshots), self._errors)
            self._job.start()

    def wait(self) -> None:
        """Return when all that was begun is written.

        Raises:
            RunError: it could not be; what was saved before is intact.
        """
        if self._job is not None:
            self._job.join()
            self._job = None
        if self._errors:
            raise self._errors.pop(0)

    def wait_to_end(self) -> None:
        """Wait while another error ends the run: what could not be written is only a warning."""
        try:
            self.wait()
        except Exception as error:
            _warn_of([error])


class _Job(threading.Thread):
    """Writes its snapshots, and stops at the first that fails."""

    def __init__(self, snapshots: deque[Snapshot], errors: list[Exception]) -> None:
        self.directory = snapshots[0].path.parent.resolve()
        super().__init__(name=f"writes {self.directory}")
        self.snapshots, self.errors = snapshots, errors

    def run(self) -> None:
        try:
            while self.snapshots:
                # no name is kept for the snapshot, so that its memory is free before the next
                _write(self.snapshots.popleft())
        except Exception as error:
            self.errors.append(error)
        finally:
            self.snapshots.clear()


def _write(snapshot: Snapshot) -> None:
    """Write one snapshot, and do what comes then."""
    save_checkpoint(snapshot.path, snapshot.tensors, snapshot.notes)
    if snapshot.then is not None:
        snapshot.then()


def _warn_of(errors: list[Exception]) -> None:
    """Say what could not be written, where an error cannot be raised."""
    for error in errors:
        warnings.warn(str(error), stacklevel=2)


def wait_for_writers(directory: Path) -> None:
    """Return when no thread of this process is writing checkpoints in a directory.

    A run that is loaded in the process that trains it is then what was saved last.
    """
    for thread in threading.enumerate():
        if isinstance(thread, _Job) and thread.directory == directory.resolve():
            thread.join()
