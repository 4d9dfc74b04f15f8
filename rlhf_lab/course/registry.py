"""The registry of exercises, in the order of the lessons."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from rlhf_lab.course.exercise import Exercise

EXERCISE_FILES = (
    "start value_head objective ppo debugging_ppo policy credit kl breaks watch changed "
    "preferences verifiable real question"
).split()


def all_exercises() -> tuple[Exercise, ...]:
    """Return every exercise, lesson by lesson."""
    modules = (import_module(f"rlhf_lab.course.exercises.{name}") for name in EXERCISE_FILES)
    return tuple(exercise for module in modules for exercise in module.EXERCISES)


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
