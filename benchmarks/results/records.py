"""One JSON file per run: what was asked for, from which weights, and what came out."""

import hashlib
import json
from pathlib import Path
from typing import Any

from benchmarks.results.settings import PREFERENCES, Row
from rlhf_lab.errors import RunError
from rlhf_lab.organism.bundled import BUNDLED, weights_dir
from rlhf_lab.training.run_dir import replacing

Record = dict[str, Any]
KEYS = frozenset({"part", "labels", "preset", "fields", "seed", "weights"})


def place(directory: Path, row: Row, seed: int) -> Path:
    """Where the record of a run is."""
    return directory / row.part / f"{row.name}-seed{seed}.json"


def asked(row: Row, seed: int) -> Record:
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
    path = place(directory, row, seed)
    if not path.exists():
        return False
    record = read_record(path)
    return all(record.get(name) == value for name, value in asked(row, seed).items())


def write_record(path: Path, record: Record) -> None:
    """Store a record, numbers rounded to six digits; whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.write_text(json.dumps(rounded(record), indent=1) + "\n", encoding="utf-8")


def rounded(value: Any) -> Any:
    """Numbers to six digits, in whatever holds them."""
    if isinstance(value, dict):
        return {name: rounded(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(entry) for entry in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read_record(path: Path) -> Record:
    """A stored record.

    Raises:
        RunError: it is no record.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read as a record ({error}); delete it.") from error
    if not isinstance(record, dict) or not KEYS <= record.keys():
        raise RunError(f"{path} is no record of a run; delete it.")
    return record


def read_records(directory: Path) -> list[Record]:
    """All records below a directory, in the order of their names."""
    return [read_record(path) for path in sorted(directory.glob("*/*.json"))]
