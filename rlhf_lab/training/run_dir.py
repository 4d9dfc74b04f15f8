"""A run's directory: run.json, metrics.jsonl, samples.jsonl and checkpoints/, never half there."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_lab.errors import RunError


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn a failed write (a full disk, a read-only place) into one sentence."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror or error}; make room or choose another --out, "
            "then go on with `resume` (what was saved before is intact)."
        ) from error


@contextlib.contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Write a file beside the old one, then rename it: readers see the old or the new one.

    Yields the path to write to.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """`beside` for a file of a run: a failed write is told in one sentence."""
    with _writing(path), beside(path) as partial:
        yield partial


METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
RETURNED = "returned"


class RunDir:
    """Where one run keeps what it produces.

    Args:
        path: the directory; see `create` and `open` for how it comes to be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: str | Path) -> "RunDir":
        """A new, empty run directory.

        Raises:
            RunError: a run is there already, or the place cannot be written.
        """
        run = cls(Path(path))
        run.refuse_occupied()
        with _writing(run.path):
            run.checkpoints.mkdir(parents=True, exist_ok=True)
        return run

    def refuse_occupied(self) -> None:
        """Say so if no new run can go here.

        Raises:
            RunError: a run is there already, or a file.
        """
        if self.info_path.exists() or (self.path / METRICS).exists():
            raise RunError(
                f"{self.path} already holds a run; "
                f"go on with `resume {self.path}` or choose another --out."
            )
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path} is a file; choose another --out.")

    @classmethod
    def create_numbered(cls, name: str, parent: str | Path = "runs") -> "RunDir":
        """A new run directory `parent/name`, or `parent/name-2`, `-3`, ... if that is taken."""
        number, path = 1, Path(parent, name)
        while path.exists():
            number += 1
            path = Path(parent, f"{name}-{number}")
        return cls.create(path)

    @classmethod
    def open(cls, path: str | Path) -> "RunDir":
        """The directory of an earlier run.

        Raises:
            RunError: there is no such directory, or it holds no run.
        """
        run = cls(Path(path))
        if not run.path.is_dir():
            raise RunError(f"there is no directory {run.path}; give the directory of a run.")
        if not run.info_path.is_file():
            raise RunError(f"{run.path} holds no run.json; give the directory of a run.")
        return run

    @property
    def info_path(self) -> Path:
        """The file that makes a directory a run."""
        return self.path / "run.json"

    @property
    def checkpoints(self) -> Path:
        """Where the weights are."""
        return self.path / "checkpoints"

    def read_info(self) -> dict[str, Any]:
        """The contents of run.json.

        Raises:
            RunError: it is not JSON, or not that of a run.
        """
        try:
            info = json.loads(self.info_path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise RunError(
                f"{self.info_path} is unreadable ({error}); restore it or start anew."
            ) from None
        if not isinstance(info, dict) or not isinstance(info.get("args"), dict):
            raise RunError(f"{self.info_path} holds no arguments of a run; restore it.")
        return info

    def write_info(self, info: dict[str, Any]) -> None:
        """Replace run.json."""
        with replacing(self.info_path) as partial:
            partial.write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")

    def append(self, file: str, records: list[dict[str, Any]]) -> None:
        """Add lines to a JSONL file; a folder below the run's own is made if it is not there."""
        path = self.path / file
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        with _writing(path):
            if path.parent != self.path:
                path.parent.mkdir(exist_ok=True)
            with open(path, "a", encoding="utf-8") as out:
                out.write(lines)

    def read(self, file: str) -> list[dict[str, Any]]:
        """The records of a JSONL file; a last line that was cut off by a crash is left out.

        Raises:
            RunError: another line is not JSON.
        """
        path = self.path / file
        if not path.exists():
            return []
        whole_lines = path.read_bytes().split(b"\n")[:-1]
        try:
            return [json.loads(line) for line in whole_lines]
        except ValueError as error:
            raise RunError(f"{path} has a line that is not JSON ({error}); mend it.") from None

    def rewind(self, phase: int) -> None:
        """Drop what was logged from this phase on, which is about to be done again."""
        returned = [f"{RETURNED}/{path.name}" for path in self.path.glob(f"{RETURNED}/*.jsonl")]
        for file in (METRICS, SAMPLES, *returned):
            kept = [record for record in self.read(file) if _is_done(record, phase)]
            lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
            with replacing(self.path / file) as partial:
                partial.write_text(lines, encoding="utf-8")


def _is_done(record: dict[str, Any], phase: int) -> bool:
    """Whether what a record tells of is behind a run that goes on at this phase.

    The checkpoint that a run goes on from bears the number of the phase to come; the best one is
    saved within its phase, and those of phase 0 are saved again.
    """
    if record["phase"] == phase > 0:
        return record.get("checkpoint", "best") != "best"
    return record["phase"] < phase
