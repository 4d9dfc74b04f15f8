"""Records in parts that take minutes each: one is made anew, the others are kept."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def write_parts(
    path: Path,
    heading: Mapping[str, Any],
    parts: Mapping[str, Callable[[], Any]],
    asked: Sequence[str],
    digits: int,
) -> None:
    """Make some parts of a record anew, all when none is asked for, and keep the others.

    The file is written after each part.

    Args:
        heading: what the record says of itself.
        parts: what makes each part, by its name.
        asked: names of parts.
        digits: behind the point, to which numbers are rounded.

    Raises KeyError for a part that is not there.
    """
    record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    record |= heading
    for part in asked or parts:
        record[part] = rounded(parts[part](), digits)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(in_rows(record), encoding="utf-8")


def rounded(figures: Any, digits: int) -> Any:
    """All numbers to as many digits behind the point, in whatever holds them."""
    if isinstance(figures, Mapping):
        return {name: rounded(value, digits) for name, value in figures.items()}
    if isinstance(figures, list | tuple):
        return [rounded(value, digits) for value in figures]
    return round(figures, digits) if isinstance(figures, float) else figures


def in_rows(record: Mapping[str, Any]) -> str:
    """A record as JSON, with each list of plain values on one line."""
    text = json.dumps(record, indent=1)
    plain = r"\[\s+([^\[\]{}]*?)\s+\]"
    return re.sub(plain, lambda row: f"[{' '.join(row[1].split())}]", text) + "\n"
