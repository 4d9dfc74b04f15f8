"""Records of the results page: settings, seed, weights and metrics of each run."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.records import Record
from benchmarks.results.settings import PREFERENCES, Row, all_rows
from rlhf_lab.organism.bundled import BUNDLED, weights_dir

KEYS = frozenset({"part", "labels", "preset", "fields", "seed", "weights"})


def place(directory: Path, part: str) -> Path:
    """Where the records of a part are."""
    return directory / f"{part}.jsonl"


def asked(row: Row, seed: int) -> dict[str, Any]:
    """What a record says of the question: a run is done when a record with these entries exists."""
    learned = {"preferences": dict(PREFERENCES)} if row.part == "learned" else {}
    return {
        **learned,
        "part": row.part,
        "labels": list(row.labels),
        "preset": row.preset,
        "fields": row.fields,
        "seed": seed,
        "weights": bundled_digest() if row.preset == "reel" else None,
    }


def bundled_digest() -> str:
    """Twelve hexadecimal digits that change with the weights of a bundled model."""
    files = (weights_dir(name) / "model.safetensors" for name in BUNDLED)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def is_done(directory: Path, row: Row, seed: int) -> bool:
    """Whether a record answers this very question."""
    question = asked(row, seed).items()
    return any(
        all(record.get(name) == value for name, value in question)
        for record in read_part(directory, row.part)
    )


def write_record(directory: Path, record: Record) -> None:
    """Store a record among those of its part, in place of one of the same row and seed.

    Its numbers are rounded to six digits.
    """

    def of_same_run(old: Record) -> bool:
        return all(old.get(name) == record[name] for name in ("labels", "seed"))

    records.put_record(place(directory, record["part"]), rounded(record), of_same_run)


def rounded(value: Any) -> Any:
    """Numbers to six significant digits, in whatever holds them."""
    if isinstance(value, Mapping):
        return {name: rounded(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(entry) for entry in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read_part(directory: Path, part: str) -> list[Record]:
    """The records of a part; none where it has no file.

    Raises:
        RunError: a line of the file is no record of a run.
    """
    path = place(directory, part)
    return records.read_records(path, KEYS) if path.exists() else []


def read_records(directory: Path) -> list[Record]:
    """All records below a directory, part by part."""
    parts = dict.fromkeys(row.part for row in all_rows())
    return [record for part in parts for record in read_part(directory, part)]
