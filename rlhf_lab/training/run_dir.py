"""A run's directory: run.json, metrics.jsonl, samples.jsonl and checkpoints/, never half there."""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlhf_lab.errors import RunError
from rlhf_lab.files import beside, refuse_foreign
from rlhf_lab.training.notes import FORM_OF_INFO


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write (a full disk, a read-only place) into one sentence."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror or error}; make room or choose another --out, "
            "then go on with `resume` (what was saved before is intact)."
        ) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """`beside` for a file of a run: a failed write is told in one sentence."""
    with writing(path), beside(path) as partial:
        yield partial


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn contents that are JSON, but not what a run writes, into one sentence that names them."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise RunError(
            f"{path} does not hold what a run writes there ({type(error).__name__}: {error}); "
            "correct or restore it."
        ) from error


def read_object(path: Path) -> dict[str, Any]:
    """The contents of a JSON file that holds an object.

    Raises:
        RunError: it cannot be read, or is no such file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise RunError(f"{path} is unreadable ({error}); restore it or start anew.") from None
    if not isinstance(found, dict):
        raise RunError(f"{path} holds {found!r:.80}, not an object; restore it or start anew.")
    return found


INFO, METRICS, SAMPLES = "run.json", "metrics.jsonl", "samples.jsonl"
RETURNED = "returned"
Fields = Mapping[str, Any]
"""The fields that each line of a file has, with the types that they may have."""
PHASE: Fields = MappingProxyType({"phase": int})
METRIC: Fields = MappingProxyType(PHASE | {"mean_reward": float | int | None})
SAMPLE: Fields = MappingProxyType(PHASE | {"text": str, "reward": float | int})


class RunDir:
    """Where one run keeps what it produces.

    Args:
        path: the directory; see `create` and `open` for how it comes to be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def at(cls, path: Any) -> "RunDir":
        """The directory of that name, which need not be there yet.

        Raises:
            RunError: no name of a directory.
        """
        if not isinstance(path, (str, os.PathLike)) or not str(path):
            raise RunError(f"out={path!r:.60} names no directory; give a path.")
        return cls(Path(path))

    @classmethod
    def create(cls, path: str | Path) -> "RunDir":
        """A new, empty run directory.

        Raises:
            RunError: a run is there already, or the place cannot be written.
        """
        run = cls(Path(path))
        run.refuse_occupied()
        with writing(run.path):
            run.checkpoints.mkdir(parents=True, exist_ok=True)
        return run

    def refuse_occupied(self) -> None:
        """Say so if no new run can go here.

        Raises:
            RunError: a run is there already, a file, or a directory with files of a run's names.
        """
        if any("\ud800" <= character <= "\udfff" for character in str(self.path.absolute())):
            raise RunError(f"{self.path} is not UTF-8, as checkpoints need; choose another --out.")
        if self.info_path.exists() or (self.path / METRICS).exists():
            raise RunError(
                f"{self.path} already holds a run; "
                f"go on with `resume {self.path}` or choose another --out (in Python, "
                "RLHFTrainer.resume or another out)."
            )
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path} is a file; choose another --out.")
        written = self.path.glob("checkpoints/*.safetensors")
        found = next(written, self.path / SAMPLES)
        if found.exists() or found.is_symlink():
            raise RunError(
                f"{self.path} holds {found.relative_to(self.path)} but no run, which would write "
                "over it; choose another --out."
            )

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
        return self.path / INFO

    @property
    def checkpoints(self) -> Path:
        """Where the weights are."""
        return self.path / "checkpoints"

    def read_info(self) -> dict[str, Any]:
        """The contents of run.json.

        Raises:
            RunError: it is not JSON, or not that of a run.
        """
        info = read_object(self.info_path)
        if not isinstance(info.get("args"), dict) or not info["args"]:
            raise RunError(f"{self.info_path} holds no arguments of a run; restore it.")
        for name, (holds, meant) in FORM_OF_INFO.items():
            if name in info and not holds(info[name]):
                raise RunError(
                    f"{self.info_path} has {name}={info[name]!r:.80}, not {meant}; "
                    "correct or restore it."
                )
        return info

    def write_info(self, info: dict[str, Any]) -> None:
        """Replace run.json."""
        with replacing(self.info_path) as partial:
            text = json.dumps(finite(info), indent=2, allow_nan=False)
            partial.write_text(text + "\n", encoding="utf-8")

    def append(self, file: str, records: list[dict[str, Any]]) -> None:
        """Add lines to a JSONL file; a folder below the run's own is made if it is not there."""
        path = self.path / file
        refuse_foreign(path)
        with writing(path):
            if path.parent != self.path:
                path.parent.mkdir(exist_ok=True)
            with open(path, "a", encoding="utf-8") as out:
                out.write(json_lines(records))

    def read(self, file: str, fields: Fields = PHASE) -> list[dict[str, Any]]:
        """The records of a JSONL file; a last line that was cut off by a crash is left out.

        Args:
            fields: what every line must have.

        Raises:
            RunError: it cannot be read, another line is not JSON, or a line lacks a field.
        """
        path = self.path / file
        if not path.exists() and not path.is_symlink():
            return []
        if not path.is_file():  # a pipe would be waited for, and a device read without end
            raise RunError(f"{path} is no regular file; restore it or take it away.")
        try:
            whole_lines = path.read_bytes().split(b"\n")[:-1]
        except OSError as error:
            raise RunError(f"{path} is unreadable ({error.strerror}); restore it.") from None
        return [
            _record(line, f"{path}, line {number},", fields)
            for number, line in enumerate(whole_lines, 1)
        ]

    def keep(self, file: str, stays: Callable[[dict[str, Any]], bool]) -> None:
        """Drop the other records of a JSONL file; one that is not there stays away."""
        path = self.path / file
        if path.exists() or path.is_symlink():
            kept = [record for record in self.read(file) if stays(record)]
            with replacing(self.path / file) as partial:
                partial.write_text(json_lines(kept), encoding="utf-8")


def json_lines(records: list[dict[str, Any]]) -> str:
    """Records as JSON, one on each line."""
    return "".join(
        json.dumps(finite(record), ensure_ascii=False, allow_nan=False) + "\n" for record in records
    )


def finite(value: Any) -> Any:
    """A value of JSON's types, with null for the numbers that JSON does not have: nan and inf."""
    if isinstance(value, dict):
        return {name: finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _record(line: bytes, place: str, fields: Fields) -> dict[str, Any]:
    """What one line holds; a line that no run writes is refused with its place."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{place} is not JSON ({error}); fix or delete it.") from None
    if not isinstance(record, dict):
        raise RunError(f"{place} is {record!r:.80}, not an object; fix or delete it.")
    for name, kind in fields.items():
        if name not in record:
            raise RunError(f"{place} has no field {name!r}; fix or delete it.")
        value = record[name]
        flag_for_number = isinstance(value, bool) and kind is not bool
        below_0 = name == "phase" and isinstance(value, int) and value < 0
        if not isinstance(value, kind) or flag_for_number or below_0:
            raise RunError(f"{place} has {name}={record[name]!r:.80}; fix or delete it.")
    return record
