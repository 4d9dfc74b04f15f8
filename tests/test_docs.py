"""The pages in docs/ name only what exists, and their programs run."""

import ast
import contextlib
import dataclasses
import importlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from beartype.door import is_bearable

from rlhf_lab.__main__ import parse
from rlhf_lab.config import RLHFArgs

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FEATURES = (DOCS / "features.md").read_text(encoding="utf-8")
OUTSIDE = "## What does not fit this lab"
COMMAND = "python -m rlhf_lab "


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


HERE, THERE = FEATURES.split(OUTSIDE)
FEATURE_ROWS = rows(HERE, 4)
PRESENT = [row for row in FEATURE_ROWS if row[1] != "not yet"]


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


def check_command(words: list[str]) -> None:
    """Fail unless the help of the command line is that of this command, with its options."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit):
        parse([*words, "--help"])
    command = " ".join(word for word in words if not word.startswith("--"))
    assert shown.getvalue().split("usage: ")[1].startswith(f"rlhf_lab {command} ")
    assert all(word in shown.getvalue().split() for word in words if word.startswith("--"))


def check_name(name: str) -> None:
    """Fail unless this is a command, a field with a value that it may have, or a path."""
    if name.startswith(COMMAND):
        check_command(name.removeprefix(COMMAND).split())
    elif name.startswith("RLHFArgs."):
        field, _, value = name.removeprefix("RLHFArgs.").partition("=")
        hints = get_type_hints(RLHFArgs)
        assert field in {f.name for f in dataclasses.fields(RLHFArgs)}, name
        assert not value or is_bearable(ast.literal_eval(value), hints[field]), name
    else:
        resolve(name)


def names_of_ours() -> list[str]:
    """All names that features.md gives as ours, each once."""
    cells = [row[1] for row in PRESENT] + [row[2] for row in rows(THERE, 3)]
    names = (name for cell in cells for name in quoted(cell) if "*" not in name)
    return list(dict.fromkeys(names))


def defined_tests(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", names_of_ours())
def test_every_name_of_ours_exists(name):
    check_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "functional.no_such_function",
        "no_such_room.sample",
        "training.Rollout.no_such_field",
        "RLHFArgs.no_such_field",
        'RLHFArgs.advantages="no_such_estimator"',
        COMMAND + "no-such-command",
        COMMAND + "train --no-such-option",
    ],
)
def test_a_name_that_does_not_exist_is_noticed(name):
    with pytest.raises((Exception, pytest.fail.Exception)):
        check_name(name)


def test_there_is_a_row_for_each_capability_with_name_and_test_or_not_yet():
    assert len(FEATURE_ROWS) > 120
    for capability, here, shown, _ in FEATURE_ROWS:
        if here == "not yet":
            assert shown == "–", capability
        else:
            assert quoted(here) and quoted(shown), capability
    capabilities = [row[0] for row in FEATURE_ROWS]
    assert all(capabilities)


def cited() -> Iterator[tuple[str, str]]:
    for row in PRESENT:
        for name in quoted(row[2]):
            path, _, test = name.partition("::")
            yield path, test


@pytest.mark.parametrize("path", sorted({path for path, _ in cited()}))
def test_every_test_that_is_named_exists(path):
    named = {test for other, test in cited() if other == path}
    assert all(test.startswith("test_") for test in named)
    assert named <= defined_tests(ROOT / "tests" / path)
