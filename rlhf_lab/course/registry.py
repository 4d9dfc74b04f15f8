"""The registry of exercises, in the order of the lessons."""

from collections.abc import Callable
from typing import Any

from rlhf_lab.course.exercise import Exercise
from rlhf_lab.course.exercises import (
    alarm,
    breaks,
    changed,
    credit,
    kl,
    objective,
    policy,
    ppo,
    preferences,
    question,
    real,
    start,
    value_head,
    watch,
)


def all_exercises() -> tuple[Exercise, ...]:
    """Return every exercise, lesson by lesson."""
    files = (start, policy, value_head, credit, kl, objective, ppo, alarm)
    files += (breaks, watch, changed, preferences, real, question)
    return tuple(exercise for file in files for exercise in file.EXERCISES)


def find_exercise(fn: Callable[..., Any] | str) -> Exercise:
    """Return the exercise with the name of a function or class.

    Raises:
        ValueError: If no exercise has this name.
    """
    name = fn if isinstance(fn, str) else getattr(fn, "__name__", repr(fn))
    exercises = {exercise.name: exercise for exercise in all_exercises()}
    if name not in exercises:
        raise ValueError(f"{name} is not an exercise. Choose one of: {', '.join(exercises)}.")
    return exercises[name]
