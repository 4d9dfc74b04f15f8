"""Answers of learners, made of the package's own code."""

import inspect
import types
from collections.abc import Callable
from typing import Any

from rlhf_lab.course.exercise import Exercise
from rlhf_lab.course.grading import Judge, Verdict


def written(function: Callable[..., Any]) -> Callable[..., Any]:
    """The package's function as if a learner had written it: the same code, as another function."""
    inner = inspect.unwrap(function)
    code = inner.__code__.replace(co_name="written")
    own = types.FunctionType(code, inner.__globals__, "written", inner.__defaults__)
    own.__kwdefaults__ = inner.__kwdefaults__
    return own


def verdict_on(exercise: Exercise, fn: Callable[..., Any]) -> Verdict:
    """Compare a function with the reference of an exercise."""
    return Judge(exercise).verdict(fn)
