"""Verification of the lessons: every lesson is built from its master, executed and unsolved."""

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat

from rlhf_lab.course.exercise import all_exercises
from tools.course.builder import learner_notebook, masters, notebook_path, solution_notebook
from tools.course.size import FUNCTION, lesson_name, lesson_size

OPENING = re.compile(r"# [^\n]+\n+By the end of this lesson, you will be able to\s")
LIMITS = {"lines": 450, "words": 2500, "predictions": 5, "figures": 16}
MORE_PREDICTIONS = ("what_breaks_it", "watch_it_learn", "what_rlhf_changed", "preferences")


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
    text, name = master.read_text(encoding="utf-8"), lesson_name(master)
    if "Allow about {minutes} minutes" not in text:
        yield "it does not state its minutes; write `Allow about {minutes} minutes`"
    if name != master.stem:
        yield from _too_long(master, learner.cells[0].source)
    if not learner.cells[0].source.startswith(f"# {master.stem.removesuffix(name).rstrip('_')}"):
        yield "the title does not begin with the number of the file"
    if paths[0].read_text(encoding="utf-8") != nbformat.writes(learner) + "\n":
        yield "the notebook differs from its master; run `make course`"
    solution, expected = nbformat.read(paths[1], as_version=4), solution_notebook(master)
    if [(c.id, c.source) for c in solution.cells] != [(c.id, c.source) for c in expected.cells]:
        yield "the solution differs from its master; run `make course`"
    outputs = [output for cell in solution.cells for output in cell.get("outputs", [])]
    if not outputs or any(output.output_type == "error" for output in outputs):
        yield "the solution was not executed, or not without an error; run `make course`"
    exercises = {exercise.name for exercise in all_exercises() if exercise.lesson == name}
    for exercise in exercises ^ {x for _, x, mark in FUNCTION.findall(text) if mark == "exercise"}:
        yield f"{exercise} is an exercise of this lesson in one of TOML and master only"


def _too_long(master: Path, opening: str) -> Iterator[str]:
    name, size = lesson_name(master), lesson_size(master)
    limits = LIMITS | ({"predictions": 6} if name in MORE_PREDICTIONS else {})
    for field, limit in limits.items():
        if size[field] > limit:
            yield f"{size[field]} {field}, more than {limit}"
    if not OPENING.match(opening):
        yield "the first sentence does not begin with 'By the end of this lesson'"
