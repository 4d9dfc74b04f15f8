"""The lock of a run: one trainer at a time writes to a run's directory.

The lock is a file, run.lock, that says who holds it.
1. On one machine the kernel decides (flock): it drops a lock with its process, however that ended,
   so that a file left behind by a dead process is taken over at once.
2. Between machines that share a file system flock may not reach. The holder touches the file every
   `BEAT` seconds, and one that another machine left untouched for `STALE` seconds is taken over.
3. In one process the newest trainer has the lock: an older one of the same run, as is left in a
   notebook, is refused when it would go on.
"""

import contextlib
import json
import os
import socket
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from rlhf_lab.errors import RunError
from rlhf_lab.files import refuse_foreign
from rlhf_lab.training.run_dir import writing

try:
    import fcntl
except ImportError:  # Windows has no flock: the file's age decides there
    fcntl = None

LOCK = "run.lock"
OPEN = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0)
"""What a link in the lock's place leads to is never written to."""
BEAT, STALE = 15, 120
"""Seconds between two signs of life, and without one until another machine takes the lock over."""


class RunLock:
    """A trainer's hold on a run's directory, let go of with `release`, or with the object."""

    def __init__(self) -> None:
        self._held: _Held | None = None
        self._let_go: weakref.finalize | None = None

    @property
    def is_held(self) -> bool:
        """Whether the lock was taken, and not let go of."""
        return self._held is not None

    def hold(self, directory: Path) -> None:
        """Take the lock, or see that it is still ours.

        Raises:
            RunError: another trainer has it, or has taken it over; or the file cannot be written.
        """
        if self._held is None:
            self._held = _take(directory)
            self._let_go = weakref.finalize(self, self._held.release)
        elif not self._held.is_ours():
            raise RunError(
                f"another trainer has taken the run in {directory} over, and this one would write "
                f"between its lines; go on with that one, or with `resume {directory}`."
            )

    def release(self) -> None:
        """Let go of the lock; the file goes."""
        if self._let_go is not None:
            self._let_go()
        self._held = self._let_go = None


def refuse_locked(directory: Path) -> None:
    """Say so, before models are loaded, if a trainer elsewhere has a run's lock.

    Raises:
        RunError: it has.
    """
    path = directory / LOCK
    if path.exists() and _held_here(directory) is None:
        refuse_foreign(path)
        with writing(path):
            file = os.open(path, OPEN)
        try:
            _refuse_living(file, path)
        finally:
            os.close(file)


class _Held(threading.Thread):
    """The lock while it is held: an open file, and a thread that touches it."""

    def __init__(self, path: Path, file: int) -> None:
        self.path, self.file = path, file
        self.directory = path.parent.resolve()
        self._released = threading.Event()
        super().__init__(name=f"holds {self.directory}", daemon=True)

    def run(self) -> None:
        while not self._released.wait(BEAT):
            with contextlib.suppress(OSError):  # a file system that is away for a while
                if _is_file_at(self.file, self.path):
                    os.utime(self.path)

    def is_ours(self) -> bool:
        """Whether the lock was not taken over."""
        return not self._released.is_set() and _is_file_at(self.file, self.path)

    def release(self) -> None:
        """Let go; the file goes unless it is another trainer's by now."""
        if self._released.is_set():
            return
        self._released.set()
        with contextlib.suppress(OSError):  # a file that stays is taken over by the next trainer
            if _is_file_at(self.file, self.path):
                self.path.unlink(missing_ok=True)
        os.close(self.file)


def _take(directory: Path) -> _Held:
    """Take the lock of a directory."""
    path = directory / LOCK
    refuse_foreign(path)
    older = _held_here(directory)
    if older is not None:
        older.release()
    while True:
        with writing(path):
            file = os.open(path, OPEN | os.O_CREAT, 0o644)
        try:
            _refuse_living(file, path)
            if not _is_file_at(file, path):  # its holder let go of it just now, and the file went
                os.close(file)
                continue
            if _read(file).get("boot") not in (None, _boot()):
                path.unlink(
                    missing_ok=True
                )  # so that its holder, if it wakes up, sees that it went
                os.close(file)
                continue
            with writing(path):
                os.ftruncate(file, 0)
                os.lseek(file, 0, os.SEEK_SET)
                os.write(file, (json.dumps(_holder()) + "\n").encode())
        except BaseException:
            os.close(file)
            raise
        held = _Held(path, file)
        held.start()
        return held


def _refuse_living(file: int, path: Path) -> None:
    """Lock an open file, or say who holds it.

    Raises:
        RunError: a living trainer does, or may do.
    """
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _refusal(_read(file), path, "stop that one first") from None
        except OSError:  # a file system without locks: the file's age decides
            pass
        else:
            if _read(file).get("boot") in (None, _boot()):
                return
    left = STALE - (time.time() - os.fstat(file).st_mtime)
    if left > 0 and os.fstat(file).st_size:
        remedy = f"stop that one first, or, if it is gone, wait {left:.0f} s or delete {path}"
        raise _refusal(_read(file), path, remedy)


def _refusal(holder: dict[str, Any], path: Path, remedy: str) -> RunError:
    """What is said where a living trainer holds a run."""
    who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}"
    return RunError(f"{path.parent} is being trained by {who}; {remedy}.")


def _held_here(directory: Path) -> _Held | None:
    """The lock on a directory that a trainer of this process holds."""
    for thread in threading.enumerate():
        if isinstance(thread, _Held) and thread.directory == directory.resolve():
            if not thread._released.is_set():
                return thread
    return None


def _is_file_at(file: int, path: Path) -> bool:
    """Whether an open file is the one of that name."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except OSError:
        return False


def _read(file: int) -> dict[str, Any]:
    """What a lock says of its holder; nothing where it was cut off."""
    try:
        os.lseek(file, 0, os.SEEK_SET)
        found = json.loads(os.read(file, 4096))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _holder() -> dict[str, Any]:
    """What a lock says of this process."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "boot": _boot()}


def _boot() -> str:
    """What tells this kernel, which knows all holders of its locks, from every other."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
