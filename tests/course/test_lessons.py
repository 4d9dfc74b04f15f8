"""The lessons of this repository ship as their masters say."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from tests.course.test_lesson_again import BY_LESSON, ROOT, WHOLE, smaller
from tools.course import builder, gate, runner


@pytest.mark.slow
def test_every_lesson_is_complete_unsolved_and_up_to_date() -> None:
    assert gate.lesson_problems(ROOT) == []


def test_map_has_every_lesson_with_its_minutes() -> None:
    text = (ROOT / builder.MAP).read_text(encoding="utf-8")
    lessons = [path.stem for path in builder.masters(ROOT) if path.parent.name != "more"]
    names = re.findall(r"^\| \[\d\d [^]]+\]\((\w+)\.ipynb\)", text, re.MULTILINE)
    assert sorted(names) == lessons
    assert builder.map_text(ROOT) == text


def test_names_that_lessons_import_exist() -> None:
    for master in builder.masters(ROOT):
        for node in ast.walk(ast.parse(master.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("rlhf_lab"):
                module = importlib.import_module(node.module)
                missing = [x.name for x in node.names if not hasattr(module, x.name)]
                assert missing == [], (master.stem, node.module)


@pytest.mark.kernel
@BY_LESSON
def test_solution_runs_whole_in_a_fresh_kernel(master: Path) -> None:
    notebook = builder.solution_notebook(master)
    for cell in [] if WHOLE else notebook.cells:
        cell.source = smaller(cell.source) if cell.cell_type == "code" else cell.source
    executed = runner.execute(notebook, master.stem)
    checks = [cell for cell in executed.cells if cell.source.startswith("check(")]
    assert checks
    for cell in checks:
        assert "✓" in cell.outputs[0].data["text/plain"], cell.source
