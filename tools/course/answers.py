"""A table of what `check` says to wrong answers, written by people who have seen the stub alone.

A file of answers is Python that binds ANSWERS: by an exercise's name, a list of pairs of what is
wrong in words and the source of the function, as it would stand in its cell of the notebook.
Whether a sentence is true of an answer is for a person to say: `judged` holds that.
"""

import ast
import json
import os
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from IPython.core.interactiveshell import InteractiveShell
from rich.table import Table

from rlhf_lab.course.exercise import Answer, Exercise
from rlhf_lab.course.grading import Judge
from rlhf_lab.course.registry import all_exercises, find_exercise
from rlhf_lab.errors import ConfigError, LoadError
from tools.course.stub import bound_names

CHECKED = "RLHF_LAB_CHECK_SHAPES"
"""The variable under which the package checks shapes, as it does in a lesson."""
JUDGEMENTS = ("", "named", "misnamed", "vague", "right")
"""Not judged; true and of help; false; true and of no help; the answer is no wrong one."""
PREPARED = """\
%load_ext jaxtyping
%jaxtyping.typechecker beartype.beartype
"""


@dataclass(frozen=True)
class Tried:
    """What `check` said to one answer.

    Args:
        wrong: what is wrong with it, in its writer's words.
        state: passed, differs or unwritten.
        said: the sentence that follows "likely:"; empty where there is none.
        shown: the first row of what differs.
        judged: one of JUDGEMENTS, by a person.
    """

    exercise: str
    wrong: str
    state: str
    said: str
    shown: str
    judged: str = ""


def read_answers(path: Path) -> dict[str, list[tuple[str, str]]]:
    """The answers of a file, by exercise.

    Raises:
        LoadError: the file is not there, or binds no ANSWERS.
        ConfigError: it names an exercise that there is not.
    """
    if not path.is_file():
        raise LoadError(f"{str(path)!r} is no file; give a file that binds ANSWERS.")
    found = runpy.run_path(str(path)).get("ANSWERS")
    if not isinstance(found, dict):
        raise LoadError(f"{str(path)!r} binds no dict ANSWERS; see tools/course/answers.py.")
    known = {exercise.name for exercise in all_exercises()}
    for name in found:
        if name not in known:
            raise ConfigError(f"{str(path)!r} answers {name!r}, which is no exercise; rename it.")
    return found


def try_answers(answers: Mapping[str, Sequence[tuple[str, str]]], root: Path) -> Iterator[Tried]:
    """Put answers through the check, in cells of their own behind the imports of their lesson."""
    for name, given in answers.items():
        exercise = find_exercise(name)
        judge, shell = Judge(exercise), _shell_before(exercise, root)
        for wrong, source in given:
            try:
                fn = _written(shell, source, name)
            except Exception as error:
                yield Tried(name, wrong, "no answer", "", f"{type(error).__name__}: {error}")
                continue
            verdict = judge.verdict(fn)
            shown = ": ".join(verdict.miss.rows[0]) if verdict.miss else ""
            yield Tried(name, wrong, verdict.state, verdict.slip or "", shown)


def _written(shell: InteractiveShell, source: str, name: str) -> Answer:
    """What a name is bound to after a cell, whose functions are type-checked."""
    shell.user_ns.pop(name, None)
    shell.run_cell(source).raise_error()
    return shell.user_ns[name]


def _shell_before(exercise: Exercise, root: Path) -> InteractiveShell:
    """A shell that has run the imports of a lesson up to an exercise, solved those before it."""
    path = root / "notebooks" / f"{exercise.lesson}.ipynb"
    if not path.is_file():
        raise LoadError(f"{str(path)!r} is missing; run `make course`, or give another --root.")
    notebook = nbformat.read(path, as_version=4)
    lessons = {e.name: e.reference for e in all_exercises() if e.lesson == exercise.lesson}
    cells: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cells.append(_imports(cell.source))
        defined = bound_names(cell.source) & lessons.keys()
        if exercise.name in defined:
            break
        cells += [f"from {lessons[n].__module__} import {n}" for n in sorted(defined)]
    shell = InteractiveShell()
    for cell in (PREPARED, *filter(None, cells)):
        shell.run_cell(cell).raise_error()
    return shell


def _imports(source: str) -> str:
    """The imports at the top level of a cell, but for those of the cell that sets a lesson up."""
    code = "\n".join(line for line in source.splitlines() if not line.startswith("%"))
    if "find_spec" in code:
        return ""
    nodes = (n for n in ast.parse(code).body if isinstance(n, ast.Import | ast.ImportFrom))
    return "\n".join(ast.unparse(node) for node in nodes)


def with_judgements(tried: Iterable[Tried], path: Path) -> list[Tried]:
    """What was tried, with what a person has said of it, which holds for the same sentence alone.

    Raises ConfigError for a judgement that is none of JUDGEMENTS.
    """
    kept: dict[tuple[str, ...], str] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        one: dict[str, Any] = json.loads(line)
        if one["judged"] not in JUDGEMENTS:
            choices = ", ".join(filter(None, JUDGEMENTS))
            raise ConfigError(
                f"judged is {one['judged']!r} in line {number} of {path}; choose from {choices}."
            )
        kept[one["exercise"], one["wrong"], one["state"], one["said"]] = one["judged"]
    keys = [(t, (t.exercise, t.wrong, t.state, t.said)) for t in tried]
    return [Tried(**{**vars(t), "judged": kept.get(key, "")}) for t, key in keys]


def write_judgements(tried: Iterable[Tried], path: Path) -> None:
    """One line of JSON for each answer, to be judged."""
    path.write_text("".join(json.dumps(vars(one)) + "\n" for one in tried), encoding="utf-8")


def tally(tried: Sequence[Tried]) -> Table:
    """By exercise and in all: answers, rejected, with a sentence, and how sentences were judged."""
    heads = ("exercise", "answers", "rejected", "said", "named", "misnamed", "vague", "passed")
    table = Table(*heads, "right after all", box=None)
    groups: dict[str, list[Tried]] = {}
    for one in tried:
        groups.setdefault(one.exercise, []).append(one)
    for name, group in groups.items():
        table.add_row(name, *_counts(group))
    table.add_row(f"{len(groups)} in all", *_counts(tried), style="bold")
    return table


def _counts(group: Sequence[Tried]) -> list[str]:
    judged = Counter(one.judged for one in group)
    rejected = [one for one in group if one.state != "passed"]
    passed = sum(one.state == "passed" and one.judged != "right" for one in group)
    numbers = [len(group), len(rejected), sum(bool(one.said) for one in rejected)]
    numbers += [judged["named"], judged["misnamed"], judged["vague"], passed, judged["right"]]
    return [str(number) for number in numbers]


def run_checked(arguments: Sequence[str]) -> int | None:
    """Start the same command anew with shapes checked, as in a lesson; None where they are."""
    if os.environ.get(CHECKED):
        return None
    environment = {**os.environ, CHECKED: "1"}
    command = [sys.executable, "-m", "tools.course", *arguments]
    return subprocess.run(command, env=environment).returncode
