"""The cells of a lesson run twice over, and its exercises in another order."""

import json
import os
import random
import re
from pathlib import Path

import pytest

from rlhf_lab.course.registry import all_exercises
from tests.warm import WarmPython
from tools.course import builder
from tools.course.stub import used_names

ROOT = Path(__file__).parents[2]
MASTERS = builder.masters(ROOT)
WHOLE = bool(os.environ.get("RLHF_LAB_NIGHTLY"))
DAILY = ("00_start", "01_the_value_head")
BY_LESSON = pytest.mark.parametrize(
    "master",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem in DAILY else pytest.mark.nightly)
        for path in MASTERS
    ],
)
SMALL = {"total_phases": 2, "warmup_steps": 1, "batch_size": 16, "num_minibatches": 1, "steps": 4}
SMALL |= {"n": 16, "controls": 2, "stride": 4}
TEXTS = {"96|128|192": "32", "256|512|768|1024|3000": "64", "320": "128"}
"""Texts to write, patch or look at, and how many will do; a lesson sets 64 of 320 apart."""

RUN_CELLS = """
import json, sys
from pathlib import Path
from IPython.core.interactiveshell import InteractiveShell

import rlhf_lab

rlhf_lab.check_shapes = lambda: None  # this process began with the package imported
shell = InteractiveShell.instance()
shell.ast_node_interactivity = "none"
for number, cell in json.loads(Path(sys.argv[1]).read_text()):
    result = shell.run_cell(cell)
    if result.error_in_exec or result.error_before_exec:
        print("cell", number, "failed:", cell[:200])
        sys.exit(3)
"""
Cells = list[tuple[int, str]]


def cells_of(master: Path) -> Cells:
    """The numbered code cells of a solution, small unless the lessons are to be run whole."""
    cells = builder.solution_notebook(master).cells
    code = [(i, c.source) for i, c in enumerate(cells) if c.cell_type == "code"]
    return code if WHOLE else [(i, smaller(source)) for i, source in code]


def smaller(source: str) -> str:
    """A cell with two phases of 16 wherever it trains, and with few texts."""
    for name, value in SMALL.items():
        source = re.sub(rf"\b{name}=[1-9]\d*", f"{name}={value}", source)
    for texts, few in TEXTS.items():
        source = re.sub(rf"\b(?:{texts})\b", few, source)
    return source


def name_of(source: str) -> str | None:
    """The exercise that a cell calls `check` with."""
    called = re.fullmatch(r"check\((\w+)\)", source)
    return called and called[1]


def run(cells: Cells, place: Path, warm_python: WarmPython, surroundings: dict[str, str]) -> str:
    """Run cells one after the other in a fresh process; returns what they print."""
    (place / "cells.json").write_text(json.dumps(cells), encoding="utf-8")
    own = {
        "RLHF_LAB_PROGRESS": str(place / "progress.json"),
        "IPYTHONDIR": str(place / "ipython"),
        "TMPDIR": str(place),
    }
    done = warm_python.run(["-c", RUN_CELLS, "cells.json"], cwd=place, env=surroundings | own)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


@pytest.mark.slow
@BY_LESSON
def test_every_cell_can_be_run_again(
    master: Path, tmp_path: Path, warm_python: WarmPython, surroundings: dict[str, str]
) -> None:
    cells = [cell for cell in cells_of(master) if WHOLE or not name_of(cell[1])]
    printed = run([cell for cell in cells for _ in "12"], tmp_path, warm_python, surroundings)
    assert "IProgress" not in printed and "non-tuple" not in printed


@pytest.mark.slow
@BY_LESSON
def test_exercises_need_the_set_up_and_the_exercises_that_they_use_only(
    master: Path, tmp_path: Path, warm_python: WarmPython, surroundings: dict[str, str]
) -> None:
    cells = dict(cells_of(master))
    checks = {name: i for i, source in cells.items() if (name := name_of(source))}
    until = next(i for i, source in cells.items() if builder.SET_UP.search(source))
    order = shuffled({name: used_names(without_magic(cells[i - 1])) for name, i in checks.items()})
    given = {
        i
        for i, cell in enumerate(builder.solution_notebook(master).cells)
        if "given" in cell.metadata.get("tags", [])
    }
    wanted = [(i, source) for i, source in cells.items() if i <= until or i in given]
    for name in order:
        wanted += [(i, cells[i]) for i in (checks[name] - 1, checks[name])]
    printed = run(wanted, tmp_path, warm_python, surroundings)
    assert printed.count("✓") == len(checks) and "✗" not in printed


def without_magic(source: str) -> str:
    """A cell as Python that can be parsed."""
    return "\n".join(line for line in source.splitlines() if not line.lstrip().startswith("%"))


def shuffled(uses: dict[str, set[str]]) -> list[str]:
    """Names in an order of chance, each behind those that it uses; not the given one."""
    order: list[str] = []
    left = list(uses)
    random.Random(1).shuffle(left)
    while left:
        free = next(name for name in left if not uses[name] & (set(left) - {name}))
        order.append(free)
        left.remove(free)
    return order


@pytest.mark.slow
def test_the_exercises_of_all_lessons_are_found() -> None:
    found = [name for m in MASTERS for _, source in cells_of(m) if (name := name_of(source))]
    assert sorted(found) == sorted(exercise.name for exercise in all_exercises())
