"""Records of an experiment: one .jsonl file for each, one compact line per record."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhf_lab.errors import RunError
from rlhf_lab.files import partial_file

Record = Mapping[str, Any]
RESULTS = Path("benchmarks/results")  # seen from the root of the repository


def read_records(path: Path, keys: frozenset[str]) -> list[Record]:
    """Read the records of a file, each of which must have these keys."""
    records = []
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            record = json.loads(line)
            if not isinstance(record, dict) or not keys <= record.keys():
                raise ValueError(f"line {number} lacks a key of {sorted(keys)}")
            records.append(record)
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path} does not contain valid records ({error}). Use a file of records."
        ) from error
    return records


def store_record(path: Path, record: Record, replaces: Callable[[Record], bool]) -> None:
    """Store a record in the position of the first one that it replaces, or at the end."""
    records = read_records(path, frozenset()) if path.exists() else []
    position = next((i for i, old in enumerate(records) if replaces(old)), len(records))
    records[position : position + 1] = [record]
    write_whole(path, "".join(json.dumps(r, separators=(",", ":")) + "\n" for r in records))


def write_whole(path: Path, text: str) -> None:
    """Write a file completely or not at all, since the old one has earlier measurements."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with partial_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def rounded(value: Any) -> Any:
    """Round all numbers of nested lists and mappings to six significant digits."""
    if isinstance(value, Mapping):
        return {name: rounded(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(entry) for entry in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
