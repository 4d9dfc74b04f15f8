"""Records of the results page: settings, seed, weights and metrics of each run."""

import hashlib
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.records import Record
from benchmarks.results.settings import PREFERENCES, Row, all_rows
from rlhf_lab.organism.bundled import REEL_MODELS, weights_dir

KEYS = frozenset({"part", "labels", "preset", "fields", "seed", "weights"})


def run_key(row: Row, seed: int) -> dict[str, Any]:
    """Return the entries that identify a run: it is done if a record has them."""
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
    """Return twelve hexadecimal digits that change with the weights of a Reel model."""
    files = (weights_dir(name) / "model.safetensors" for name in REEL_MODELS)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def is_done(directory: Path, row: Row, seed: int) -> bool:
    """Return True if the run has a record."""
    key = run_key(row, seed).items()
    known = read_records(directory, row.part)
    return any(all(record.get(name) == value for name, value in key) for record in known)


def write_record(directory: Path, record: Record) -> None:
    """Store a record, instead of an earlier one of the same row and seed."""
    same_run = lambda old: all(old.get(name) == record[name] for name in ("labels", "seed"))
    path = directory / f"{record['part']}.jsonl"
    records.store_record(path, records.rounded(record), same_run)


def read_records(directory: Path, *parts: str) -> list[Record]:
    """Read the records of some parts, or of all."""
    paths = [
        directory / f"{part}.jsonl" for part in parts or dict.fromkeys(r.part for r in all_rows())
    ]
    return [r for path in paths if path.exists() for r in records.read_records(path, KEYS)]
