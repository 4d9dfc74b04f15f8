"""Verification of the course: every exercise is complete, every lesson ships as it should."""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from rlhf_lab.course.exercise import Exercise
from rlhf_lab.course.grading import Judge
from rlhf_lab.course.mutants import generic_mutants, mutant
from rlhf_lab.course.registry import all_exercises
from tools.course.builder import learner_notebook, masters, same_cells, solution_notebook
from tools.course.stub import UNWRITTEN

LONGEST_MINUTES = 40


@dataclass(frozen=True)
class Tally:
    """How an exercise's check did: how many wrong answers it was given, and what is wrong with it.

    Args:
        slips, generic: wrong answers tried; each was rejected and named unless `problems` says so.
    """

    name: str
    cases: int
    slips: int
    generic: int
    problems: tuple[str, ...]


def try_exercise(exercise: Exercise) -> Tally:
    """Put the reference, every slip and every generic mistake through the check.

    1. The exercise has a difficulty, minutes, three different hints, cases and two slips.
    2. The reference runs on all cases, and passes.
    3. Every wrong answer is rejected, and named; a slip by its own name.
    """
    judge, generic = Judge(exercise), generic_mutants(exercise)
    problems = [
        *_incomplete(exercise),
        *_reference_fails(judge),
        *_slips_pass(judge),
        *_generic_mistakes_pass(judge, generic),
    ]
    return Tally(
        exercise.name, len(judge.cases), len(exercise.slips), len(generic), tuple(problems)
    )


def _incomplete(exercise: Exercise) -> Iterator[str]:
    if not 1 <= exercise.difficulty <= 5:
        yield f"difficulty is {exercise.difficulty}; give 1 to 5"
    if not 1 <= exercise.minutes <= LONGEST_MINUTES:
        yield f"minutes is {exercise.minutes}; give 1 to {LONGEST_MINUTES}"
    if len({hint.strip() for hint in exercise.hints} - {""}) != 3:
        yield "there are not three different hints"
    if len(exercise.slips) < 2:
        yield f"there are {len(exercise.slips)} slips; give at least 2"


def _reference_fails(judge: Judge) -> Iterator[str]:
    for case, outcome in zip(judge.cases, judge.expected, strict=True):
        if outcome.error:
            yield f"the reference raises {outcome.error} in case {case.label}"
    if judge.verdict(judge.exercise.reference).state != "passed":
        yield "the reference does not pass"


def _slips_pass(judge: Judge) -> Iterator[str]:
    for slip in judge.exercise.slips:
        try:
            verdict = judge.verdict(mutant(judge.exercise, slip))
        except ValueError as stale:
            yield str(stale)
            continue
        if verdict.state != "differs":
            yield f"the slip passes: {slip.says}"
        elif verdict.slip != slip.says:
            yield f"the slip {slip.says!r} is taken for {verdict.slip!r}"
        elif (verdict.miss.kind == "error") != slip.raises:
            yield f"the slip {slip.says!r} gives {verdict.miss.rows[0][1]}; raises is {slip.raises}"


def _generic_mistakes_pass(
    judge: Judge, generic: Mapping[str, Callable[..., Any]]
) -> Iterator[str]:
    for says, wrong in generic.items():
        verdict = judge.verdict(wrong)
        if verdict.state != "differs" or verdict.slip is None:
            yield f"a generic mistake passes or is not named: {says}"


def lesson_problems(root: Path) -> list[str]:
    """What is wrong with the lessons below a repository's root; nothing, if the list is empty."""
    problems, shipped = [], {master.stem: master for master in masters(root)}
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        if path.stem not in shipped:
            problems.append(f"notebooks/{path.name} has no master; delete it or write one")
    for master in shipped.values():
        problems += [f"{master.stem}: {problem}" for problem in _one_lesson(master, root)]
    return problems


def _one_lesson(master: Path, root: Path) -> Iterator[str]:
    there = {name: root / name / f"{master.stem}.ipynb" for name in ("notebooks", "solutions")}
    for name, path in there.items():
        if not path.exists():
            yield f"{name}/{path.name} is missing; run `make course`"
            return
    learner = learner_notebook(master)
    if there["notebooks"].read_text(encoding="utf-8") != nbformat.writes(learner) + "\n":
        yield "the notebook is not what the master makes; run `make course`"
    if not same_cells(solution_notebook(master), there["solutions"]):
        yield "the solution is not what the master makes; run `make course`"
    solution = nbformat.read(there["solutions"], as_version=4)
    outputs = [output for cell in solution.cells for output in cell.get("outputs", [])]
    if not outputs or any(output.output_type == "error" for output in outputs):
        yield "the solution was not executed, or not without an error; run `make course`"
    yield from _unsolved(master.stem, learner)


def _unsolved(lesson: str, notebook: nbformat.NotebookNode) -> Iterator[str]:
    """Every exercise of the lesson is there, as a stub that a check follows."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    for exercise in all_exercises():
        if exercise.lesson != lesson:
            continue
        found = [i for i, source in enumerate(code) if _defines(source, exercise.name)]
        if len(found) != 1:
            yield f"{exercise.name} is there {len(found)} times; it should be there once"
        elif not ships_unsolved(code[found[0]], exercise):
            yield f"{exercise.name} ships solved"
        elif code[found[0] + 1] != f"check({exercise.name})":
            yield f"{exercise.name} has no check behind it"


def _defines(source: str, name: str) -> bool:
    return re.search(rf"^(def|class) {name}\b", source, re.MULTILINE) is not None


def ships_unsolved(source: str, exercise: Exercise) -> bool:
    """Whether what the learner has to write is a docstring and an error, and nothing else."""
    definition = ast.parse(source).body[-1]
    functions = [definition]
    if isinstance(definition, ast.ClassDef):
        functions = [n for n in definition.body if getattr(n, "name", "") in exercise.methods]
    bodies = [[ast.unparse(statement) for statement in f.body[1:]] for f in functions]
    return bool(bodies) and all(body == [UNWRITTEN] for body in bodies)
