"""The lock of a run's directory: one trainer at a time, on one machine.

The operating system drops the lock when its process ends, so a killed run can be resumed at once.
On a network file system the lock may not reach other machines: start one trainer per run there.
"""

import contextlib
from pathlib import Path

from filelock import FileLock, Timeout

from rlhf_lab.errors import RunError
from rlhf_lab.files import refuse_foreign
from rlhf_lab.training.run_dir import writing

LOCK = "run.lock"


class RunLock:
    """A trainer's lock on a run; within one process, the newest trainer takes it over."""

    def __init__(self) -> None:
        self._lock: FileLock | None = None

    @property
    def is_held(self) -> bool:
        """True from `hold` to `release`."""
        return self._lock is not None

    def hold(self, directory: Path) -> None:
        """Take the lock, or check that a newer trainer of this process has not taken it.

        Raises:
            RunError: If another trainer holds the lock, or the file cannot be written.
        """
        if self._lock is None:
            path = directory.absolute() / LOCK
            refuse_foreign(path)
            # one FileLock per path and process: an older trainer of this process loses it here
            lock = FileLock(path, timeout=0, thread_local=False, is_singleton=True)
            lock.release(force=True)
            with writing(path):
                try:
                    lock.acquire()
                except Timeout:
                    raise RunError(
                        f"{directory} is being trained by another process. Stop that one first."
                    ) from None
            self._lock, lock.owner = lock, id(self)
        elif self._lock.owner != id(self):
            raise RunError(
                f"Another trainer has taken over the run in {directory}. Continue with that one, "
                f"or call RLHFTrainer.resume({str(directory)!r})."
            )

    def release(self) -> None:
        """Release the lock, unless a newer trainer has it."""
        if self._lock is not None and self._lock.owner == id(self):
            with contextlib.suppress(OSError):  # Windows does not remove an open file
                Path(self._lock.lock_file).unlink(missing_ok=True)
            self._lock.release()
        self._lock = None
