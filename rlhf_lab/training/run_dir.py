"""A run's directory: run.json, metrics.jsonl, samples.jsonl, checkpoints/, and its lock."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rlhf_lab.errors import RunError
from rlhf_lab.files import (
    AnyPath,
    clear_draft,
    expand_home,
    partial_file,
    validate_replaceable,
    writing,
)

INFO, METRICS, SAMPLES, LOCK = "run.json", "metrics.jsonl", "samples.jsonl", "run.lock"
RETURNED = "returned"
FORMAT = 2  # of run.json and the checkpoints; other versions of a run are not read


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise a RunError that names the file if valid JSON has unexpected contents."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise RunError(
            f"{path} has unexpected contents ({type(error).__name__}: {error}). Restore it."
        ) from error


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains an object; raise RunError if it is not readable."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise RunError(f"{path} is unreadable ({error}). Restore it or start a new run.") from None
    if not isinstance(content, dict):
        raise RunError(f"{path} contains {content!r:.80}, expected an object. Restore it.")
    return content


class RunDir:
    """The directory of one run; see `create` and `open`."""

    def __init__(self, path: Path) -> None:
        self._path = expand_home(path)
        self._absolute = self._path.absolute()

    @property
    def path(self) -> Path:
        """The directory as it was passed, or absolute if the working directory has changed."""
        return self._path if self._path.absolute() == self._absolute else self._absolute

    __fspath__ = lambda self: str(self.path)
    info_path = property(lambda self: self.path / INFO)
    checkpoints = property(lambda self: self.path / "checkpoints")

    @classmethod
    def create(cls, path: str | Path) -> "RunDir":
        """Make a new run directory; raise RunError if it contains a run."""
        run = cls(Path(path))
        run.validate_empty()
        with writing(run.path):
            run.checkpoints.mkdir(parents=True, exist_ok=True)
        return run

    @classmethod
    def create_numbered(cls, name: str, parent: str | Path = "runs") -> "RunDir":
        """Make `parent/name`, or `parent/name-2`, `-3`, ... if that is taken."""
        number, path = 1, Path(parent, name)
        while path.exists():
            number += 1
            path = Path(parent, f"{name}-{number}")
        return cls.create(path)

    @classmethod
    def open(cls, path: AnyPath) -> "RunDir":
        run = cls(Path(path))
        if not run.info_path.is_file():
            remedy = "Pass the directory of a run (an adapter is for `train --adapter-path`)"
            raise RunError(f"{run.path} has no run.json. {remedy}.")
        return run

    def validate_empty(self) -> None:
        """Raise RunError if the directory contains a run, or files that a run would replace."""
        if any("\ud800" <= character <= "\udfff" for character in str(self.path.absolute())):
            raise RunError(f"{self.path} is not UTF-8, as checkpoints need. Choose another --out.")
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path} is a file. Choose another --out.")
        if self.info_path.exists() or (self.path / METRICS).exists():
            raise RunError(
                f"{self.path} already holds a run. Continue with `resume {self.path}`, or choose "
                "another --out (in Python, RLHFTrainer.resume or another out)."
            )
        others = [self.path / SAMPLES, self.path / "config.json"]  # of a run, of a model
        for path in (*others, *self.path.glob("checkpoints/*.safetensors")):
            if path.exists() or path.is_symlink():
                raise RunError(f"{path} exists without a run. Choose another --out.")

    def read_info(self) -> dict[str, Any]:
        """Read run.json; raise RunError if it is not valid or of another version."""
        info = read_object(self.info_path)
        if info.get("format") != FORMAT:
            raise RunError(
                f"{self.info_path} has format {info.get('format')!r}, expected {FORMAT}: it is of "
                "another version of rlhf_lab. Use that version, or start a new run."
            )
        with reading(self.info_path):
            return info | {"id": info["id"], "args": dict(info["args"])}

    def write_info(self, info: dict[str, Any]) -> None:
        with partial_file(self.info_path) as partial:
            text = json.dumps(finite({"format": FORMAT} | info), indent=2, allow_nan=False)
            partial.write_text(text + "\n", encoding="utf-8")

    def append(self, file: str, records: list[dict[str, Any]]) -> None:
        """Add lines to a JSONL file, whose folder in the run is made if it does not exist."""
        path, text = self.path / file, json_lines(records)
        validate_replaceable(path)
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            with open(path, "a", encoding="utf-8") as out:
                out.write(text)

    def read(self, file: str) -> list[dict[str, Any]]:
        """Read records, which have a phase; raise RunError if metrics lack a phase."""
        records = self._read_lines(file)
        if file == METRICS and records:  # a page reports an empty file
            done = self._is_finished() and self.read_info().get("phases_done")
            self._validate_phases(records, done or len(records))
        return records

    def _read_lines(self, file: str) -> list[dict[str, Any]]:
        path, records = self.path / file, []
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                int(record["phase"])
            except (ValueError, RecursionError, TypeError, LookupError) as error:
                if number == len(lines) and not (line and self._is_finished()):
                    break  # empty, or truncated by a crash
                raise RunError(
                    f"{path}, line {number}, is not a JSON object with a phase "
                    f"({type(error).__name__}: {error}). Restore or correct it."
                ) from None
            records.append(record)
        return records

    def _is_finished(self) -> bool:
        return self.info_path.is_file() and self.read_info().get("status") == "finished"

    def _validate_phases(self, records: list[dict[str, Any]], n: int) -> None:
        phases = [record["phase"] for record in records]
        if phases != list(range(n)):
            raise RunError(
                f"{self.path / METRICS} must have one line for each of {n} phases in order, and "
                f"has {phases!r:.80}. Restore the file, or start a new run."
            )

    def rewind(self, phase: int) -> None:
        """Drop the records of `phase` and later, and drafts that a killed run left."""

        def is_done(record: dict[str, Any]) -> bool:
            # `last` and the numbered checkpoint of this phase were saved before it; `best` in it
            if record["phase"] == phase > 0:
                return record.get("checkpoint", "best") != "best"
            return record["phase"] < phase

        validate_replaceable(self.path / METRICS)  # a pipe would be read without end
        self._validate_phases(list(filter(is_done, self._read_lines(METRICS))), phase)
        for partial in self.checkpoints.glob(".*.partial"):
            clear_draft(partial)
        self.keep(METRICS, is_done)
        self.keep(SAMPLES, is_done)
        for path in self.path.glob(f"{RETURNED}/*.jsonl"):
            self.keep(f"{RETURNED}/{path.name}", is_done)

    def keep(self, file: str, stays: Callable[[dict[str, Any]], bool]) -> None:
        path = self.path / file
        validate_replaceable(path)
        if path.exists():
            kept = [record for record in self._read_lines(file) if stays(record)]
            with partial_file(path) as partial:
                partial.write_text(json_lines(kept), encoding="utf-8")


class RunLock:
    """A trainer's lock on a run; within one process, the newest trainer takes it over.

    The operating system drops the lock when its process ends, so a killed run can be resumed at
    once. On a network file system the lock may not reach other machines.
    """

    def __init__(self) -> None:
        self._lock: FileLock | None = None

    def hold(self, directory: Path) -> bool:
        """Take the lock and return True if it is new; raise RunError if another trainer has it."""
        is_new = self._lock is None
        if is_new:
            path = directory.absolute() / LOCK
            validate_replaceable(path)
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
        return is_new

    def is_held(self) -> bool:
        return self._lock is not None and self._lock.owner == id(self)

    def release(self) -> None:
        """Release the lock, unless a newer trainer has it."""
        if self.is_held():
            with contextlib.suppress(OSError):  # Windows does not remove an open file
                Path(self._lock.lock_file).unlink(missing_ok=True)
            self._lock.release()
        self._lock = None


def json_lines(records: list[dict[str, Any]]) -> str:
    return "".join(
        json.dumps(finite(record), ensure_ascii=False, allow_nan=False) + "\n" for record in records
    )


def finite(value: Any) -> Any:
    """Return a value with lists for tensors, and null for nan and inf, which JSON lacks."""
    if hasattr(value, "tolist"):
        return finite(value.tolist())
    if isinstance(value, dict):
        return {name: finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
