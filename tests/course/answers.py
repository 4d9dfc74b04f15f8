"""Answers of learners, made of the package's own code."""

from collections.abc import Callable
from typing import Any

from rlhf_lab.course.exercise import Exercise
from rlhf_lab.course.grading import Judge, Verdict


def verdict_on(exercise: Exercise, fn: Callable[..., Any]) -> Verdict:
    """Compare a function with the reference of an exercise."""
    return Judge(exercise).verdict(fn)
