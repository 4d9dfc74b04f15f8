"""Writes docs/settings.md: every field of RLHFArgs in its group, with its defaults and meaning.

python docs/make_settings.py
"""

import ast
import dataclasses
import inspect
from pathlib import Path

from rlhf_lab.config import GROUPS, PRESETS, RLHFArgs

HEAD = """\
# Settings

Every field of `RLHFArgs`, in the groups of `python -m rlhf_lab train --help`, where `batch_size` is
`--batch-size`. A preset ({presets}) stands in for defaults; `train` takes `reel`.
This page is written by `docs/make_settings.py` from the fields' own docstrings.
"""
TABLE = ["| field | values | default | in `reel` | meaning |", "|---|---|---|---|---|"]


def page() -> str:
    """The whole page."""
    head = HEAD.format(presets=", ".join(f"`{name}`" for name in PRESETS))
    return "\n".join([head, *("\n".join(_section(*item)) for item in GROUPS.items())])


def _section(title: str, group: type) -> list[str]:
    """A heading, and a table with a row per field."""
    lines = [f"## {title[0].upper()}{title[1:]}", "", inspect.getdoc(group), "", *TABLE]
    plain, reel, meanings = RLHFArgs(), RLHFArgs(preset="reel"), _docstrings(group)
    for field in dataclasses.fields(group):
        name, kind = field.name, field.type
        values = kind.__name__ if isinstance(kind, type) else str(kind).removeprefix("typing.")
        default, changed = getattr(plain, name), getattr(reel, name)
        in_reel = "" if changed == default else f"`{changed!r}`"
        values = " or ".join(f"`{value}`" for value in values.split(" | "))
        cells = f"`{name}`", values, f"`{default!r}`", in_reel, meanings[name]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _docstrings(group: type) -> dict[str, str]:
    """The string below each field, on one line."""
    (definition,) = ast.parse(inspect.getsource(group)).body
    pairs = zip(definition.body, definition.body[1:], strict=False)
    return {
        field.target.id: " ".join(ast.literal_eval(below.value).split())
        for field, below in pairs
        if isinstance(field, ast.AnnAssign)
    }


if __name__ == "__main__":
    path = Path(__file__).parent / "settings.md"
    path.write_text(page(), encoding="utf-8")
    print(f"written: {path}")
