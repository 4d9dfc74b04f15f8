"""The pages in docs/ as the tests read them: their tables, and the names of the package in them."""

import importlib
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def rows(text: str, columns: int) -> list[list[str]]:
    """The cells of every table row, without header rows and rules."""
    found = []
    for before, line in zip(["", *text.splitlines()], text.splitlines(), strict=False):
        if not line.startswith("|") or line.startswith("|---"):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == columns, line
        found.append((before.startswith("|"), cells))
    return [cells for follows, cells in found if follows]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def resolve(path: str) -> Any:
    """What a dotted path below the package leads to; a dataclass field is its declaration."""
    parts = path.split(".")
    found = importlib.import_module("rlhf_lab")
    for i, part in enumerate(parts):
        declared = getattr(found, "__dataclass_fields__", {})
        if part in declared:
            found = declared[part]
            continue
        if not hasattr(found, part):
            importlib.import_module(".".join(["rlhf_lab", *parts[: i + 1]]))
        found = getattr(found, part)
    return found
