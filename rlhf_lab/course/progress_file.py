"""The progress file: attempts, hints and passed exercises of a learner, as JSON.

It is at `progress_path()`: in the clone or the copy of the lessons that contains the working
directory, or where the environment variable RLHF_LAB_PROGRESS points.
"""

import contextlib
import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rlhf_lab.console import page_console, print_line
from rlhf_lab.course.copying import VERSION_FILE
from rlhf_lab.errors import RunError
from rlhf_lab.files import expand_home, partial_file

ExerciseState = Literal["unwritten", "differs", "passed"]


@dataclass(frozen=True)
class ExerciseRecord:
    """State of one exercise, number of checks and number of hints."""

    state: ExerciseState = "unwritten"
    attempts: int = 0
    hints: int = 0


def progress_path() -> Path:
    """Return the path of the progress file; the file need not exist.

    1. RLHF_LAB_PROGRESS, if set.
    2. The clone, or the copy of the lessons, that contains the working directory.
    3. The user's data folder.
    """
    if os.environ.get("RLHF_LAB_PROGRESS"):
        return expand_home(os.environ["RLHF_LAB_PROGRESS"])
    here = Path.cwd()
    for folder in (here, *here.parents):
        is_clone = (folder / "rlhf_lab" / "course" / "progress_file.py").is_file()
        is_copy = (folder / VERSION_FILE).is_file() and (folder / "00_start.ipynb").is_file()
        if is_clone or is_copy:
            return folder / ".progress.json"
    if sys.platform == "win32":
        home = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        home = Path.home() / "Library" / "Application Support"
    else:
        home = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return home / "rlhf_lab" / "progress.json"


def read_records() -> dict[str, ExerciseRecord]:
    """Return all valid records by the exercise's name, the last one written at the end."""
    records = {}
    for name, stored in read_json(progress_path(), "exercises", dict).items():
        with contextlib.suppress(TypeError):  # of other fields
            records[name] = ExerciseRecord(**stored)
    return records


def note_attempt(name: str, state: ExerciseState) -> None:
    """Record a check; a pass stays a pass."""
    old = read_records().get(name, ExerciseRecord())
    kept = "passed" if old.state == "passed" else state
    _write(name, replace(old, state=kept, attempts=old.attempts + 1))


def note_hint(name: str, number: int) -> None:
    """Record that hint `number`, counted from 1, was shown."""
    old = read_records().get(name, ExerciseRecord())
    _write(name, replace(old, hints=max(old.hints, number)))


def _write(name: str, record: ExerciseRecord) -> None:
    others = {n: asdict(r) for n, r in read_records().items() if n != name}
    content = {"version": 1, "exercises": others | {name: asdict(record)}}
    save_json(progress_path(), content, "progress")


def read_json(path: Path, key: str, kind: type) -> Any:
    """Return an entry of a learner's JSON file, or an empty `kind` without a valid file.

    A damaged file is renamed to `*.unreadable`. Devices and pipes are neither read nor moved.
    """
    try:
        if not path.is_file():
            return kind()
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and isinstance(content.get(key), kind):
            return content[key]
    except OSError:
        return kind()
    except ValueError:
        pass
    with contextlib.suppress(OSError):
        path.replace(path.with_name(path.name + ".unreadable"))
    return kind()


def save_json(path: Path, content: object, what: str) -> None:
    """Replace a learner's file in one step. Print a message if `what` cannot be saved."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial_file(path) as draft:
            draft.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except (OSError, RunError) as error:
        problem = f"{what} is not saved: {getattr(error, 'strerror', None) or error}"
        print_line(problem, page_console(), "dim")
