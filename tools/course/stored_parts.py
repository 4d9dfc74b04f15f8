"""Stored records of the course: settings that they share, and their file."""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

RECORDS = Path("rlhf_lab", "course", "records")
SEEDS = (1, 2, 3)
RUN_SETTINGS: MappingProxyType[str, Any] = MappingProxyType(
    {"preset": "reel", "warmup_steps": 2, "batch_size": 128, "num_minibatches": 4}
    | {"gen_len": 26, "top_k": None, "advantages": "gae"}
)
Parts = Mapping[str, Callable[[], Any]]


def over_seeds(run: Callable[..., Any], *kinds: Any) -> Any:
    """Return a run's results of each seed, of each kind by name if there are kinds."""
    if kinds:
        return {kind: over_seeds(functools.partial(run, kind)) for kind in kinds}
    return [run(seed) for seed in SEEDS]


def columns(run: Callable[..., Any], *kinds: Any) -> dict[str, dict[str, list[float]]]:
    """Return a column over seeds for each metric of each kind of run."""
    found = over_seeds(run, *kinds)
    return {kind: {x: [one[x] for one in every] for x in every[0]} for kind, every in found.items()}


def write_parts(
    path: Path, heading: Mapping[str, Any], parts: Parts, chosen: Sequence[str], digits: int
) -> None:
    """Compute the chosen parts of a record, or all, and keep the others."""
    record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    record |= heading
    path.parent.mkdir(parents=True, exist_ok=True)
    for part in chosen or parts:
        record[part] = rounded(parts[part](), digits)
        path.write_text(in_rows(record), encoding="utf-8")  # a later part may take minutes


def rounded(values: Any, digits: int) -> Any:
    """Round all numbers of nested lists and mappings."""
    if isinstance(values, Mapping):
        return {name: rounded(value, digits) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [rounded(value, digits) for value in values]
    return round(values, digits) if isinstance(values, float) else values


def in_rows(record: Mapping[str, Any]) -> str:
    """Format a record as JSON with each list of plain values on one line."""
    plain = r"\[\s+([^\[\]{}]*?)\s+\]"
    text = json.dumps(record, indent=1)
    return re.sub(plain, lambda row: f"[{' '.join(row[1].split())}]", text) + "\n"
