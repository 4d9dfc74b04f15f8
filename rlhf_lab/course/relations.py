"""Relations of a wrong answer to the right one, for answers that no known mistake explains.

A relation is reported only if it holds in every case that differs.
"""

import inspect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_lab.course.exercise import Exercise
from rlhf_lab.course.outcomes import Difference, Outcome, close

Pair = tuple[Tensor, Tensor]  # yours and the expected one
OutcomePairs = Sequence[tuple[Outcome, Outcome]]  # of the cases that differ


def strong_relation(differences: Sequence[Difference], pairs: OutcomePairs) -> str | None:
    """Return the first relation that holds in all cases that differ, or None.

    1. Arguments changed in place, and nothing else wrong.
    2. Two results swapped.
    3. Numbers: see `RELATIONS`, then a factor and a difference.
    4. A gradient that is missing, or that should not be there.
    """
    kinds = {difference.kind for difference in differences}
    if kinds == {"in place"}:
        names = dict.fromkeys(row[0] for difference in differences for row in difference.rows)
        return (
            f"this changes {' and '.join(names)} in place, which the caller may still need: make "
            "a new tensor, or copy it first"
        )
    return (
        _swapped(pairs)
        or _number_relation(pairs)
        or (_missing_gradient(pairs) if kinds == {"gradient"} else None)
    )


def weak_relation(exercise: Exercise, differences: Sequence[Difference]) -> str | None:
    """Return the part of an answer that is wrong: the gradient, an argument, or a few cases."""
    if {difference.kind for difference in differences} == {"gradient"}:
        return (
            "the values are right, but the gradient is wrong: look for a clamp, a rounding, a "
            "replaced nan or a detach between the argument and the result"
        )
    cases, wrong = exercise.cases(), [difference.case for difference in differences]
    if len(wrong) == len(cases):
        return None
    if not inspect.isclass(exercise.reference):
        for name in inspect.signature(exercise.reference).parameters:
            given = [label for label in cases if cases[label].get(name) is not None]
            if given == wrong:
                return f"all cases are right without {name} and wrong with it: how do you use it?"
    return f"all cases are right except: {'; '.join(wrong)}" if len(wrong) <= 2 else None


def _swapped(pairs: OutcomePairs) -> str | None:
    for first, second in itertools.combinations(pairs[0][1].results, 2):
        if all(
            is_close(yours.results.get(first), theirs.results.get(second))
            and is_close(yours.results.get(second), theirs.results.get(first))
            and not is_close(theirs.results.get(first), theirs.results.get(second))
            for yours, theirs in pairs
        ):
            return f"{first} and {second} are swapped"
    return None


def _is_late(yours: Tensor, theirs: Tensor) -> bool:
    return yours.ndim > 0 and yours.shape[-1] > 2 and is_close(yours[..., 1:], theirs[..., :-1])


def _is_backwards(yours: Tensor, theirs: Tensor) -> bool:
    return yours.ndim > 0 and yours.shape[-1] > 1 and is_close(yours.flip(-1), theirs)


RELATIONS = (
    (lambda yours, theirs: is_close(yours, 0 * theirs), "the result is 0 everywhere"),
    (lambda yours, theirs: is_close(-yours, theirs), "the sign is reversed"),
    (_is_backwards, "the numbers are right, but in reverse order"),
    (_is_late, "the numbers are one position too late"),
    (lambda yours, theirs: _is_late(theirs, yours), "the numbers are one position too early"),
    (lambda yours, theirs: is_close(yours, theirs.exp()), "this is the exponential of the result"),
    (lambda yours, theirs: is_close(yours, theirs.abs()), "this is the absolute value"),
)


def _number_relation(pairs: OutcomePairs) -> str | None:
    found = [pair for outcomes in pairs for pair in _differing(*outcomes)]
    if 2 * len(found) < len(pairs) or sum(theirs.numel() for _, theirs in found) < 2:
        return None
    for holds, words in RELATIONS:
        if all(holds(*pair) for pair in found):
            return words
    kept = [theirs.abs() > 1e-9 for _, theirs in found]
    if all(k.any() for k in kept):
        factors = [(y[k] / t[k]).median() for (y, t), k in zip(found, kept, strict=True)]
        if all(is_close(y, f * t) for (y, t), f in zip(found, factors, strict=True)):
            if _is_constant(factors):
                return f"all numbers are {factors[0]:.3g} times the expected ones: check factors"
            if any(theirs.numel() > 1 for _, theirs in found):
                return "each case is off by a constant factor: check products and divisions"
    shifts = [(yours - theirs).mean() for yours, theirs in found]
    if all(is_close(y, t + shift) for (y, t), shift in zip(found, shifts, strict=True)):
        if _is_constant(shifts):
            return f"all numbers are {abs(shifts[0]):.3g} too {'high' if shifts[0] > 0 else 'low'}"
        if any(theirs.numel() > 1 for _, theirs in found):
            return "each case is off by a constant: check what is added or subtracted"
    return None


def _is_constant(numbers: Sequence[Tensor]) -> bool:
    return all(abs(x - numbers[0]) < 1e-3 * abs(numbers[0]) for x in numbers)


def _differing(outcome: Outcome, expected: Outcome) -> Iterator[Pair]:
    for name, theirs in expected.results.items():
        yours = outcome.results.get(name)
        if _is_numeric(yours) and _is_numeric(theirs) and not is_close(yours, theirs):
            pair = _tensor(yours), _tensor(theirs)
            if pair[0].shape == pair[1].shape and all(x.isfinite().all() for x in pair):
                yield pair


def _is_numeric(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())


def _tensor(value: Any) -> Tensor:
    return torch.as_tensor(value).detach().double()


def is_close(yours: Any, theirs: Any) -> bool:
    """Return True if two results are the same numbers, up to rounding."""
    if not (_is_numeric(yours) and _is_numeric(theirs)):
        return False
    yours, theirs = _tensor(yours), _tensor(theirs)
    same_shape = yours.shape == theirs.shape
    return same_shape and bool(close(yours, theirs, 1e-3, 1e-5, least=1e-3).all())


def _missing_gradient(pairs: OutcomePairs) -> str | None:
    if not any(yours.attached for yours, _ in pairs):
        return "the result has no gradient: look for detach, item, no_grad or a new tensor"
    for name in pairs[0][1].gradients:
        has = {
            (bool(yours.gradients[name].any()), bool(theirs.gradients[name].any()))
            for yours, theirs in pairs
            if name in yours.gradients
        }
        if has == {(False, True)}:
            return f"no gradient reaches {name}: look for a detach on the way"
        if has == {(True, False)}:
            return f"a gradient reaches {name}, which should be detached"
    return None
