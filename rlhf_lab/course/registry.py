"""The registry of exercises, in the order of the lessons."""

from collections.abc import Callable
from typing import Any

from rlhf_lab.course.exercise import Exercise
from rlhf_lab.course.exercises import (
    advantages,
    alarm,
    breaks,
    changed,
    credit,
    diffing,
    entropy,
    hooks,
    kl,
    kl_control,
    leash,
    losses,
    normalize,
    optimizer,
    own_reward,
    policy,
    ppo,
    preferences,
    question,
    real,
    start,
    value_head,
    watch,
    whole,
)


def all_exercises() -> tuple[Exercise, ...]:
    """Every exercise, lesson by lesson."""
    inside = (policy, hooks, value_head)
    rewarded = (normalize, credit, advantages, kl, leash)
    objective = (entropy, losses, whole, kl_control)
    phases = (optimizer, ppo, alarm, breaks)
    ends = (watch, changed, diffing, preferences, real, question)
    files = (start, own_reward, *inside, *rewarded, *objective, *phases, *ends)
    return tuple(exercise for file in files for exercise in file.EXERCISES)


def find_exercise(fn: Callable[..., Any] | str) -> Exercise:
    """The exercise of a function or class, by its name.

    Raises ValueError for a name that is no exercise.
    """
    name = fn if isinstance(fn, str) else getattr(fn, "__name__", repr(fn))
    exercises = {exercise.name: exercise for exercise in all_exercises()}
    if name not in exercises:
        raise ValueError(f"{name} is no exercise; the exercises are {', '.join(exercises)}.")
    return exercises[name]
