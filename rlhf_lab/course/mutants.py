"""Mutants: wrong answers made from a reference by an exercise's slips."""

import contextlib
import inspect
import re
import sys
import textwrap

from rlhf_lab.course.exercise import Answer, Exercise, Slip


def dedented_source(reference: Answer) -> str:
    """Return the source of a function or class, starting at the left margin."""
    return textwrap.dedent(inspect.getsource(inspect.unwrap(reference)))


def mutant(exercise: Exercise, slip: Slip) -> Answer:
    """Return the reference with a slip in it, from a copy of its module.

    Raises:
        ValueError: If a text that the slip edits does not occur exactly once in the source.
    """
    reference, source = exercise.reference, dedented_source(exercise.reference)
    for old in slip.edits:
        if source.count(old) != 1:
            raise ValueError(
                f"{old!r} occurs {source.count(old)} times in {reference.__name__}, in the slip "
                f"{slip.says!r}. Edit text that occurs once."
            )
    pattern = re.compile("|".join(map(re.escape, slip.edits)))
    edited = pattern.sub(lambda match: slip.edits[match[0]], source)
    namespace = dict(vars(sys.modules[reference.__module__]))
    exec(compile(edited, f"<mutant of {exercise.name}>", "exec"), namespace)
    return namespace[exercise.name]


def known_mistakes(exercise: Exercise) -> list[tuple[str, Answer]]:
    """Return mutants with their descriptions: all slips, then all slips in each other form.

    Slips whose edit does not apply are left out: the author's tests report them.
    """
    known = []
    for form in ({}, *exercise.forms):
        for slip in exercise.slips:
            if not any(a in b or b in a for a in slip.edits for b in form):
                with contextlib.suppress(ValueError):
                    edited = Slip(slip.says, {**form, **slip.edits})
                    known.append((slip.says, mutant(exercise, edited)))
    return known
