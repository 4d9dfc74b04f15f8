"""The cells of a lesson run twice over, and its exercises in another order."""

import os
import random
import re
from pathlib import Path

import pytest

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
# numbers of texts, and smaller ones; a lesson holds out 64 of 320
TEXTS = {"96|128|192": "32", "256|512|768|1024|3000": "64", "320": "128"}
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


def checked_name(source: str) -> str | None:
    called = re.fullmatch(r"check\((\w+)\)", source)
    return called and called[1]


@pytest.mark.slow
@BY_LESSON
def test_every_cell_can_be_run_again(master: Path, tmp_path: Path, run_cells) -> None:
    cells = [cell for cell in cells_of(master) if WHOLE or not checked_name(cell[1])]
    printed = run_cells([cell for cell in cells for _ in "12"], tmp_path)
    assert "IProgress" not in printed and "non-tuple" not in printed


@pytest.mark.slow
@BY_LESSON
def test_exercises_need_the_set_up_and_the_exercises_that_they_use_only(
    master: Path, tmp_path: Path, run_cells
) -> None:
    cells = dict(cells_of(master))
    checks = {name: i for i, source in cells.items() if (name := checked_name(source))}
    until = next(i for i, source in cells.items() if builder.SET_UP.search(source))
    order = shuffled({name: used_names(without_magic(cells[i - 1])) for name, i in checks.items()})
    tags = [cell.metadata.get("tags", []) for cell in builder.solution_notebook(master).cells]
    wanted = [(i, x) for i, x in cells.items() if i <= until or "given" in tags[i]]
    for name in order:
        wanted += [(i, cells[i]) for i in (checks[name] - 1, checks[name])]
    printed = run_cells(wanted, tmp_path)
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
