"""The progress file: attempts, hints and passed exercises of a learner, as JSON.

It lies at `progress_path()`: in the clone or the copy of the lessons that one works in, or where
the environment variable RLHF_LAB_PROGRESS points.
"""

import contextlib
import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from rlhf_lab.course.copying import VERSION_FILE
from rlhf_lab.errors import RunError
from rlhf_lab.files import beside

ExerciseState = Literal["unwritten", "differs", "passed"]
VERSION = 1
IN_LESSONS = ".progress.json"


@dataclass(frozen=True)
class ExerciseRecord:
    """One exercise: how it stands, how often it was checked, how many hints were taken."""

    state: ExerciseState = "unwritten"
    attempts: int = 0
    hints: int = 0


def progress_path() -> Path:
    """Where the progress file is; it need not exist.

    1. Where RLHF_LAB_PROGRESS points.
    2. In the clone, or the copy of the lessons, that holds the working directory: two of them know
       nothing of each other.
    3. In the user's data folder, elsewhere.
    """
    chosen = os.environ.get("RLHF_LAB_PROGRESS")
    if chosen:
        return Path(chosen)
    with contextlib.suppress(OSError):  # a working directory that is gone
        here = Path.cwd()
        for place in (here, *here.parents):
            if _holds_lessons(place):
                return place / IN_LESSONS
    if sys.platform == "win32":
        home = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        home = Path.home() / "Library" / "Application Support"
    else:
        home = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return home / "rlhf_lab" / "progress.json"


def _holds_lessons(place: Path) -> bool:
    """Whether a directory is a clone of the repository, or one that `course copy` wrote."""
    if (place / "rlhf_lab" / "course" / "progress_file.py").is_file():
        return True
    copied, first = place / VERSION_FILE, place / "00_start.ipynb"
    return copied.is_file() and first.is_file()


def read_records() -> dict[str, ExerciseRecord]:
    """All records by the exercise's name; what cannot be understood is left out.

    A file that is no progress file at all is put aside as progress.json.unreadable. Devices and
    pipes are neither read nor moved.
    """
    path = progress_path()
    try:
        if not path.is_file():
            return {}
        stored = json.loads(path.read_text(encoding="utf-8"))["exercises"]
        return {name: record for name, r in stored.items() if (record := _record(r)) is not None}
    except OSError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError):
        with contextlib.suppress(OSError):
            path.replace(path.with_name(path.name + ".unreadable"))
        return {}


def _record(stored: Any) -> ExerciseRecord | None:
    try:
        record = ExerciseRecord(stored["state"], int(stored["attempts"]), int(stored["hints"]))
    except (ValueError, KeyError, TypeError):
        return None
    return record if record.state in get_args(ExerciseState) else None


def note_attempt(name: str, state: ExerciseState) -> str | None:
    """Note a check; an exercise that has passed once stays passed. Returns what went wrong."""
    old = read_records().get(name, ExerciseRecord())
    kept = "passed" if old.state == "passed" else state
    return _write(name, replace(old, state=kept, attempts=old.attempts + 1))


def note_hint(name: str, number: int) -> str | None:
    """Note that hint `number`, from 1, was taken. Returns what went wrong."""
    old = read_records().get(name, ExerciseRecord())
    return _write(name, replace(old, hints=max(old.hints, number)))


def _write(name: str, record: ExerciseRecord) -> str | None:
    """Replace the file in one step; a full or read-only disk costs the note, not the check."""
    records = read_records() | {name: record}
    content = {"version": VERSION, "exercises": {n: asdict(r) for n, r in sorted(records.items())}}
    return save_json(progress_path(), content, "progress")


def save_json(path: Path, content: object, what: str) -> str | None:
    """Replace a learner's file in one step. Returns what went wrong, with `what` is not saved."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside(path) as draft:
            draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        return f"{what} is not saved: {error.strerror or error}"
    except RunError as error:
        return f"{what} is not saved: {error}"
    return None
