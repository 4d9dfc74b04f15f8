"""Records of an experiment: one .jsonl file for each, one compact line per record."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhf_lab.errors import RunError
from rlhf_lab.training.run_dir import beside

Record = Mapping[str, Any]
RESULTS = Path("benchmarks/results")
"""Where the records of this repository are, seen from its root."""


def read_records(path: Path, keys: frozenset[str]) -> list[Record]:
    """The records of a file, in the order of its lines.

    Args:
        keys: what each record has at least.

    Raises:
        RunError: the file cannot be read, or a line of it is no such record.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunError(
            f"{path} cannot be read as records ({reason}); name a file of records."
        ) from error
    return [_record(path, number, line, keys) for number, line in enumerate(lines, 1)]


def _record(path: Path, number: int, line: str, keys: frozenset[str]) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise RunError(
            f"{path} cannot be read as records (line {number}: {error}); delete that line or "
            "name another file."
        ) from error
    if not isinstance(record, dict) or not keys <= record.keys():
        raise RunError(
            f"{path} holds no record of this kind in line {number}; delete that line or "
            "name another file."
        )
    return record


def put_record(path: Path, record: Record, replaces: Callable[[Record], bool]) -> None:
    """Store a record; the file is written whole or not at all.

    Args:
        replaces: whether the record takes the place of one that is there; if of none, it is added.
    """
    records = read_records(path, frozenset()) if path.exists() else []
    place = next((i for i, old in enumerate(records) if replaces(old)), len(records))
    records[place : place + 1] = [record]
    lines = (json.dumps(one, separators=(",", ":")) + "\n" for one in records)
    write_whole(path, "".join(lines))


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all, since what was measured before is in the old one.

    Raises:
        RunError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {path} ({error.strerror}); choose another place.") from error
