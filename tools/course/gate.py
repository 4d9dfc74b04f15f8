"""Verification of the lessons: every lesson is built from its master, executed and unsolved."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat

from rlhf_lab.course.exercise import Exercise
from rlhf_lab.course.registry import all_exercises
from tools.course.builder import (
    learner_notebook,
    lesson_name,
    masters,
    notebook_path,
    solution_notebook,
)
from tools.course.stub import UNWRITTEN


def lesson_problems(root: Path) -> list[str]:
    """List the problems of the lessons of a repository."""
    sources = masters(root)
    known = {notebook_path(master, root, "notebooks") for master in sources}
    problems = [
        f"{path.relative_to(root)} has no master; delete it or write one"
        for pattern in ("notebooks/*.ipynb", "notebooks/more/*.ipynb")
        for path in sorted({*root.glob(pattern)} - known)
    ]
    for master in sources:
        problems += [f"{master.stem}: {problem}" for problem in _one_lesson(master, root)]
    return problems


def _one_lesson(master: Path, root: Path) -> Iterator[str]:
    paths = [notebook_path(master, root, folder) for folder in ("notebooks", "solutions")]
    for path in paths:
        if not path.exists():
            yield f"{path.relative_to(root)} is missing; run `make course`"
            return
    learner = learner_notebook(master)
    number = "" if lesson_name(master) == master.stem else f"{master.stem[:2]} "
    if not learner.cells[0].source.startswith(f"# {number}"):
        yield "the title does not begin with the number of the file"
    if paths[0].read_text(encoding="utf-8") != nbformat.writes(learner) + "\n":
        yield "the notebook differs from its master; run `make course`"
    solution, expected = nbformat.read(paths[1], as_version=4), solution_notebook(master)
    if [(c.id, c.source) for c in solution.cells] != [(c.id, c.source) for c in expected.cells]:
        yield "the solution differs from its master; run `make course`"
    outputs = [output for cell in solution.cells for output in cell.get("outputs", [])]
    if not outputs or any(output.output_type == "error" for output in outputs):
        yield "the solution was not executed, or not without an error; run `make course`"
    code = [cell.source for cell in learner.cells if cell.cell_type == "code"]
    for exercise in all_exercises():
        if exercise.lesson == lesson_name(master):
            yield from _shipped_wrong(exercise, code)


def _shipped_wrong(exercise: Exercise, code: list[str]) -> Iterator[str]:
    definition = re.compile(rf"^(def|class) {exercise.name}\b", re.MULTILINE)
    found = [i for i, source in enumerate(code) if definition.search(source)]
    if len(found) != 1:
        yield f"{exercise.name} is defined {len(found)} times instead of once"
    elif not ships_unsolved(code[found[0]], exercise):
        yield f"{exercise.name} ships solved"
    elif code[found[0] + 1] != f"check({exercise.name})":
        yield f"{exercise.name} is not followed by its check"


def ships_unsolved(source: str, exercise: Exercise) -> bool:
    """Return True if the learner's part is only a docstring and an error."""
    definition = ast.parse(source).body[-1]
    functions = [definition]
    if isinstance(definition, ast.ClassDef):
        functions = [n for n in definition.body if getattr(n, "name", "") in exercise.methods]
    bodies = [[ast.unparse(statement) for statement in f.body[1:]] for f in functions]
    return bool(bodies) and all(body == [UNWRITTEN] for body in bodies)
