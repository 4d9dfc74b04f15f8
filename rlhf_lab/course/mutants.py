"""Mutants: wrong answers made from a reference by an exercise's slips or generic mistakes."""

import contextlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf_lab.course.exercise import Answer, Exercise, Slip

RETURNS_ZERO = "the result is 0 everywhere"
DETACHED = "the result is cut off from the gradient (detach, item, no_grad or a new tensor)"
FLIPPED = "the sign is the other way round"
SUMMED = "this is a sum where a mean is asked for"


def source_of(reference: Answer) -> str:
    """The source of a function or class, starting at the left margin."""
    return textwrap.dedent(inspect.getsource(inspect.unwrap(reference)))


def mutant(exercise: Exercise, slip: Slip) -> Answer:
    """The reference with a slip in it.

    Raises ValueError if what the slip edits does not stand exactly once in its source.
    """
    reference, source = exercise.reference, source_of(exercise.reference)
    for old in slip.edits:
        if source.count(old) != 1:
            raise ValueError(
                f"the slip {slip.says!r} edits {old!r}, which stands {source.count(old)} times in "
                f"{reference.__name__}; choose text that stands there once."
            )
    places = re.compile("|".join(re.escape(old) for old in slip.edits))
    return compiled_mutant(reference, places.sub(lambda place: slip.edits[place[0]], source), {})


def known_mistakes(exercise: Exercise) -> list[tuple[str, Answer]]:
    """Return the known mistakes of an exercise with their descriptions.

    1. The reference with each slip in it.
    2. The generic mistakes.
    3. Each slip in each other form of the reference that has room for it.
    4. A result of 0, which some slips also give.

    Slips whose edit does not apply are left out: the author's tests report them.
    """
    generic = generic_mutants(exercise)
    zero = generic.pop(RETURNS_ZERO)
    known = [*_slipped(exercise, {}), *generic.items()]
    known += [pair for form in exercise.forms for pair in _slipped(exercise, form)]
    return [*known, (RETURNS_ZERO, zero)]


def _slipped(exercise: Exercise, form: Mapping[str, str]) -> list[tuple[str, Answer]]:
    found = []
    for slip in exercise.slips:
        if any(a in b or b in a for a in slip.edits for b in form):
            continue
        with contextlib.suppress(ValueError):
            found.append((slip.says, mutant(exercise, Slip(slip.says, {**form, **slip.edits}))))
    return found


def compiled_mutant(reference: Answer, source: str, instead: Mapping[str, Any]) -> Answer:
    """Run a definition in the reference's module, with some names replaced."""
    namespace = {**vars(sys.modules[reference.__module__]), **instead}
    exec(compile(source, f"<mutant of {reference.__name__}>", "exec"), namespace)
    return namespace[reference.__name__]


def generic_mutants(exercise: Exercise) -> dict[str, Answer]:
    """Return the mistakes that fit any exercise: 0, a reversed sign, no gradient, a sum as mean."""
    reference = exercise.reference
    wrong = {RETURNS_ZERO: _returning(reference, _zero)}
    if inspect.isclass(reference):
        return wrong
    case = exercise.cases()[0]
    result = exercise.observe(reference, case.arguments)
    if isinstance(result, (Tensor, float)):
        wrong[FLIPPED] = _returning(reference, lambda out: -out)
    if exercise.gradients:
        wrong[DETACHED] = _returning(reference, lambda out: out.detach())
    source = source_of(reference)
    if "masked_mean(" in source and reference.__name__ != "masked_mean":
        wrong[SUMMED] = compiled_mutant(reference, source, {"masked_mean": _masked_sum})
    return wrong


def _returning(reference: Answer, change: Callable[[Any], Any]) -> Answer:
    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(reference(*args, **kwargs))

    changed.__name__ = reference.__name__
    return changed


def _zero(out: Any) -> Any:
    return torch.zeros_like(out) if isinstance(out, Tensor) else 0


def _masked_sum(x: Tensor, mask: Tensor | None = None, **ignored: Any) -> Tensor:
    return x.sum() if mask is None else x.masked_fill(~mask, 0.0).sum()
