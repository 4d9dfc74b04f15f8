"""A watch on whether a learner's answer calls the very function that it should replace."""

import contextlib
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from rlhf_lab.course.exercise import Answer, Exercise


@contextlib.contextmanager
def watched(exercise: Exercise, fn: Answer) -> Iterator[set[str]]:
    """Note the names of those parts of the package's own answer that run inside.

    The package's own function may be checked as it is, and is not watched.
    """
    called: set[str] = set()
    if inspect.unwrap(fn) is inspect.unwrap(exercise.reference):
        yield called
        return
    codes, before = _codes(exercise), sys.getprofile()

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in codes:
            called.add(frame.f_code.co_name)

    sys.setprofile(look)
    try:
        yield called
    finally:
        sys.setprofile(before)


def _codes(exercise: Exercise) -> set[CodeType]:
    """The code of the reference, or of those methods that the learner writes."""
    reference = inspect.unwrap(exercise.reference)
    if not inspect.isclass(reference):
        return {reference.__code__}
    return {inspect.unwrap(vars(reference)[name]).__code__ for name in exercise.methods}
