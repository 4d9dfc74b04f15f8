"""Background saving: a thread writes copies of the training state while the run continues."""

import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor


def copied_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous copies in host memory; from CUDA, in pinned memory with one wait."""
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies[name] = copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)
    return copies


class CheckpointWriter:
    """Runs one save at a time in a thread, which the process waits for before it exits."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._errors: list[Exception] = []
        weakref.finalize(self, _warn_about, self._errors)  # of a run that nobody continues

    def start(self, directory: Path, save: Callable[[], None]) -> None:
        """Wait for the previous save, then call `save` in a thread. It writes to `directory`."""
        self.wait()
        errors = self._errors

        def run() -> None:
            try:
                save()
            except Exception as error:
                errors.append(error)

        self._thread = threading.Thread(target=run, name=f"saving to {directory.resolve()}")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the save in progress, and raise its error if it failed."""
        if self._thread is not None:
            self._thread.join()
        if self._errors:
            raise self._errors.pop()


def wait_for_writers(directory: Path) -> None:
    """Wait for the threads of this process that write to a directory of checkpoints."""
    for thread in threading.enumerate():
        if thread.name == f"saving to {directory.resolve()}":
            thread.join()


def _warn_about(errors: list[Exception]) -> None:
    for error in errors:
        warnings.warn(str(error), stacklevel=2)
