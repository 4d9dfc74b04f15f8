"""The learner's functions: check, hint and progress."""

import functools
from collections.abc import Callable
from typing import Any

from rich.console import Console

from rlhf_lab.console import page_console, print_line
from rlhf_lab.course.display import LessonError, hint_panel, progress_table, verdict_panel
from rlhf_lab.course.grading import Judge
from rlhf_lab.course.progress_file import (
    ExerciseRecord,
    note_attempt,
    note_hint,
    progress_path,
    read_records,
)
from rlhf_lab.course.registry import all_exercises, find_exercise


class CheckNotPassed(LessonError):
    """Stops a notebook's run at the first function that differs."""


def check(fn: Callable[..., Any]) -> None:
    """Compare your function with the package's own, on seeded cases, and show what differs.

    1. Compare shape, dtype, values and gradients, and that the arguments are left untouched.
    2. Show one line if all is well, or the first difference beside what was expected, and the
       mistake behind it where it is a known one.
    3. Note the result for `progress()`, unless it is the package's own function.

    In a notebook a miss also raises CheckNotPassed, shown as one line, so that "run all" stops
    there. Raises ValueError for a function that is no exercise.
    """
    if not callable(fn):
        raise ValueError(f"{fn!r:.60} is no function; give check your own, named as the exercise.")
    exercise, console = find_exercise(fn), page_console()
    verdict = _judge_of(exercise.name).verdict(fn)
    console.print(verdict_panel(exercise, verdict))
    if fn is not exercise.reference:
        _tell(console, note_attempt(exercise.name, verdict.state))
    if verdict.state != "passed" and _in_notebook():
        state = "is not written yet" if verdict.state == "unwritten" else "differs"
        raise CheckNotPassed(f"{exercise.name} {state}: the run stops here until its check passes.")


@functools.cache
def _judge_of(name: str) -> Judge:
    """One for all checks of an exercise: what it knows of known mistakes takes seconds."""
    return Judge(find_exercise(name))


def hint(fn: Callable[..., Any] | str) -> None:
    """Show the next of the three hints for a function, given itself or by name; then all again.

    Raises ValueError for a function that is no exercise.
    """
    exercise, console = find_exercise(fn), page_console()
    taken = read_records().get(exercise.name, ExerciseRecord()).hints
    number = min(taken + 1, len(exercise.hints))
    for shown in range(1 if taken >= len(exercise.hints) else number, number + 1):
        console.print(hint_panel(exercise, shown))
    _tell(console, note_hint(exercise.name, number))


def progress() -> None:
    """Show every exercise with its state, the checks and the hints it took, and the file of it."""
    console = page_console()
    console.print(progress_table(all_exercises(), read_records()))
    print_line(f"kept in {progress_path()}; delete this file to begin again", console, "dim")


def _tell(console: Console, problem: str | None) -> None:
    if problem:
        print_line(problem, console, "dim")


def _in_notebook() -> bool:
    """Whether an IPython shell runs this."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return get_ipython() is not None
