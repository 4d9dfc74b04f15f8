"""The learner's functions: check, hint and progress."""

import functools
from collections.abc import Callable
from typing import Any

from rlhf_lab.console import page_console, print_line
from rlhf_lab.course.display import LessonError, hint_panel, progress_table, verdict_panel
from rlhf_lab.course.exercise import all_exercises, find_exercise
from rlhf_lab.course.grading import Judge
from rlhf_lab.course.progress_file import (
    ExerciseRecord,
    note_attempt,
    note_hint,
    progress_path,
    read_records,
)


class CheckNotPassed(LessonError):
    """Stops a notebook's run at the first function that differs."""


def check(fn: Callable[..., Any]) -> None:
    """Compare your function with the package's on seeded cases, and show the first difference.

    1. Compare shape, dtype, values and gradients, and that the arguments are unchanged.
    2. Show one line if all are equal, or the first difference, and its mistake if it is known.
    3. Record the result for `progress()`, unless it is the package's own function.

    Raises:
        CheckNotPassed: In a notebook, if the function differs: "run all" stops.
        ValueError: If the function is not an exercise.
    """
    if not callable(fn):
        raise ValueError(f"{fn!r:.60} is not a function. Pass the function itself.")
    exercise, console = find_exercise(fn), page_console()
    verdict = _get_judge(exercise.name).verdict(fn)
    console.print(verdict_panel(exercise, verdict))
    if fn is not exercise.reference:
        note_attempt(exercise.name, verdict.state)
    if verdict.state != "passed" and console.is_jupyter:
        state = "is not written yet" if verdict.state == "unwritten" else "differs"
        raise CheckNotPassed(f"{exercise.name} {state}: the run stops here until its check passes.")


@functools.cache
def _get_judge(name: str) -> Judge:
    return Judge(find_exercise(name))


def hint(fn: Callable[..., Any] | str) -> None:
    """Show the next of the three hints for a function or its name; after the last, all again.

    Raises:
        ValueError: If the function is not an exercise.
    """
    exercise, console = find_exercise(fn), page_console()
    before, last = read_records().get(exercise.name, ExerciseRecord()).hints, len(exercise.hints)
    number = min(before + 1, last)
    for i in range(1 if before >= last else number, number + 1):
        console.print(hint_panel(exercise, i))
    note_hint(exercise.name, number)


def progress() -> None:
    """Show the exercises of the lesson that you checked last, and how many have passed in all."""
    console = page_console()
    console.print(progress_table(all_exercises(), read_records()))
    print_line(f"saved in {progress_path()}; delete this file to start over", console, "dim")
