"""Relations of a wrong answer to the right one, named where no known mistake explains it.

A relation is named only if it holds in every case that is missed (so that it is not one number's
coincidence), and says what is seen, not what was meant.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_lab.course.exercise import Case, Exercise
from rlhf_lab.course.outcomes import Miss, Outcome

Pair = tuple[Tensor, Tensor]
"""Yours and the expected one."""


def relation(
    exercise: Exercise,
    outcomes: Sequence[Outcome],
    expected: Sequence[Outcome],
    misses: Sequence[Miss | None],
) -> str | None:
    """The first thing that holds in all missed cases, in words.

    1. An argument that is None, and is used as if it were there.
    2. Results in another order.
    3. Numbers: a constant factor, its reciprocal, a constant difference, the exponential or the
       logarithm, one place too late or too early, backwards.
    """
    missed = [i for i, miss in enumerate(misses) if miss]
    found = [outcomes[i] for i in missed]
    wanted = [expected[i] for i in missed]
    cases = [misses[i].case for i in missed]
    answers = (
        _none_is_used(exercise, found[0], cases[0]),
        _swapped(found, wanted),
        _of_numbers(found, wanted, OF_ALL_NUMBERS),
        _without_gradient([misses[i] for i in missed], found, wanted),
    )
    return next((answer for answer in answers if answer), None)


def shapes(
    exercise: Exercise,
    outcomes: Sequence[Outcome],
    expected: Sequence[Outcome],
    misses: Sequence[Miss | None],
) -> str | None:
    """A shape of the first missed case that lacks an axis, has one too many, or has other sizes."""
    first = next(i for i, miss in enumerate(misses) if miss)
    return _of_shapes(exercise, outcomes[first], expected[first])


def changed_in_place(misses: Sequence[Miss | None]) -> str | None:
    """The arguments that an answer changes, where nothing else is wrong with it."""
    missed = [miss for miss in misses if miss]
    if {miss.kind for miss in missed} != {"in place"}:
        return None
    names = dict.fromkeys(row[0] for miss in missed for row in miss.rows)
    return (
        f"this changes {' and '.join(names)} in place, which belongs to the caller: make a new "
        "tensor, or copy it first"
    )


def weak_relation(
    exercise: Exercise,
    outcomes: Sequence[Outcome],
    expected: Sequence[Outcome],
    misses: Sequence[Miss | None],
) -> str | None:
    """What is said where nothing explains an answer: which part of it is wrong.

    1. A right value with a wrong gradient.
    2. Zeros everywhere.
    3. An argument without which everything is right.
    """
    missed = [i for i, miss in enumerate(misses) if miss]
    alone = _gradient_alone([misses[i] for i in missed])
    zero = _of_numbers([outcomes[i] for i in missed], [expected[i] for i in missed], (ZERO,))
    return alone or zero or _argument_at_fault(exercise, missed, misses, outcomes)


def _none_is_used(exercise: Exercise, outcome: Outcome, case: Case | None) -> str | None:
    if not outcome.error or "NoneType" not in outcome.error or case is None:
        return None
    absent = [name for name in _optional(exercise) if case.arguments.get(name) is None]
    if not absent:
        return None
    return f"{' or '.join(absent)} is None here, which is the default, and is used all the same"


def _with_default(exercise: Exercise) -> list[str]:
    """The names of the reference's arguments that may be left out."""
    if inspect.isclass(exercise.reference):
        return []
    parameters = inspect.signature(inspect.unwrap(exercise.reference)).parameters
    return [n for n, parameter in parameters.items() if parameter.default is not parameter.empty]


def _optional(exercise: Exercise) -> list[str]:
    """The names of the arguments that are None by default."""
    if inspect.isclass(exercise.reference):
        return []
    parameters = inspect.signature(inspect.unwrap(exercise.reference)).parameters
    return [name for name, parameter in parameters.items() if parameter.default is None]


def _swapped(found: Sequence[Outcome], wanted: Sequence[Outcome]) -> str | None:
    """Whether two results have changed places."""
    names = list(wanted[0].results)
    for first, second in itertools.combinations(names, 2):
        if all(
            _close(yours.results.get(first), theirs.results.get(second))
            and _close(yours.results.get(second), theirs.results.get(first))
            and not _close(theirs.results.get(first), theirs.results.get(second))
            for yours, theirs in zip(found, wanted, strict=True)
        ):
            return f"{first} and {second} are the other way round"
    return None


def _of_shapes(exercise: Exercise, outcome: Outcome, expected: Outcome) -> str | None:
    name, pair = next(_unequal_shapes(outcome, expected), ("", None))
    if pair is None:
        return None
    yours, theirs = (list(x.shape) for x in pair)
    due = _axes(exercise) if len(expected.results) == 1 else ""
    due = f": {due}" if due else ""
    if pair[0].numel() == pair[1].numel():
        if 1 in yours and [n for n in yours if n != 1] == [n for n in theirs if n != 1]:
            return f"an axis of size 1 is left over in {name}{due}"
        if 1 in theirs and len(yours) < len(theirs):
            return f"squeeze() takes every axis of size 1 away, that of the batch, too{due}"
        return f"{name} has its axes in another order{due}"
    if len(yours) > len(theirs):
        reduced = "one number" if not theirs else f"{len(theirs)} axes"
        return f"an axis is there that has to go, by a sum or a mean: {reduced} in the end{due}"
    if len(yours) < len(theirs):
        return f"an axis is gone that has to stay: {name} is summed or averaged too far{due}"
    axis = next(i for i, (n, m) in enumerate(zip(yours, theirs, strict=True)) if n != m)
    more = yours[axis] - theirs[axis]
    number = f"{abs(more)} too {'many' if more > 0 else 'few'}"
    return f"along axis {axis} of {name} there are {yours[axis]} entries, {number}{due}"


def _unequal_shapes(outcome: Outcome, expected: Outcome) -> Iterator[tuple[str, Pair]]:
    for name, theirs in expected.results.items():
        yours = outcome.results.get(name)
        if isinstance(yours, Tensor) and isinstance(theirs, Tensor) and yours.shape != theirs.shape:
            yield name, (yours, theirs)


def _axes(exercise: Exercise) -> str:
    """What the reference promises to return, by the names of its axes."""
    hint = inspect.signature(inspect.unwrap(exercise.reference)).return_annotation
    axes = getattr(hint, "dim_str", None)
    if axes is None or "..." in axes or "*" in axes:
        return ""
    return f"it is [{axes.strip()}]" if axes.strip() else "it is a single number"


def _of_numbers(
    found: Sequence[Outcome], wanted: Sequence[Outcome], relations: "Sequence[NumberRelation]"
) -> str | None:
    """A relation of all numbers that differ, in every case; with their names, if there are others.

    A factor and a difference are looked for behind the relations of `OF_ALL_NUMBERS`.
    """
    pairs = [
        pair
        for yours, theirs in zip(found, wanted, strict=True)
        for pair in _differing(yours, theirs)
    ]
    if 2 * len(pairs) < len(found) or sum(theirs.numel() for _, theirs in pairs) < 2:
        return None
    of = _names_of_differing(found, wanted)
    for holds, words in relations:
        if all(_is_safe(holds, pair) for pair in pairs):
            return of + words
    if relations is not OF_ALL_NUMBERS:
        return None
    words = _factor(pairs) or _difference(pairs)
    return words and of + words


def _names_of_differing(found: Sequence[Outcome], wanted: Sequence[Outcome]) -> str:
    """The names of the results that differ and a colon; nothing where all of them do."""
    numeric = [name for name, value in wanted[0].results.items() if _is_numeric(value)]
    pairs = list(zip(found, wanted, strict=True))
    wrong = [
        name
        for name in numeric
        if any(not _close(y.results.get(name), t.results.get(name)) for y, t in pairs)
    ]
    return "" if len(wrong) == len(numeric) else f"{' and '.join(wrong)}: "


def _differing(outcome: Outcome, expected: Outcome) -> list[Pair]:
    """The results that differ and are finite; empty where one cannot be compared."""
    pairs = []
    for name, theirs in expected.results.items():
        yours = outcome.results.get(name)
        if not _is_numeric(theirs):
            continue
        if not _is_numeric(yours):
            return []
        yours, theirs = _tensor(yours), _tensor(theirs)
        if yours.shape != theirs.shape:
            return []
        if _close(yours, theirs):
            continue
        if not torch.equal(yours.isfinite(), theirs.isfinite()):
            return []
        if yours.isfinite().all():
            pairs.append((yours, theirs))
    return pairs


def _is_numeric(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point() and not value.is_meta and value.layout == torch.strided
    if isinstance(value, list):
        return bool(value) and all(isinstance(x, float) for x in value)
    return isinstance(value, float)


def _tensor(value: Any) -> Tensor:
    return torch.as_tensor(value).detach().double()


def _close(yours: Any, theirs: Any) -> bool:
    if not (_is_numeric(yours) and _is_numeric(theirs)):
        return False
    yours, theirs = _tensor(yours), _tensor(theirs)
    if yours.shape != theirs.shape:
        return False
    finite = theirs[theirs.isfinite()].abs()
    atol = 1e-5 * max(1e-3, finite.max().item() if finite.numel() else 0.0)
    return torch.allclose(yours, theirs, rtol=1e-3, atol=atol, equal_nan=True)


def _is_safe(holds: Callable[[Tensor, Tensor], bool], pair: Pair) -> bool:
    return bool(pair[0].isfinite().all() and pair[1].isfinite().all()) and holds(*pair)


def _backwards(yours: Tensor, theirs: Tensor) -> bool:
    return yours.ndim > 0 and yours.shape[-1] > 1 and _close(yours.flip(-1), theirs)


def _late(yours: Tensor, theirs: Tensor) -> bool:
    return yours.ndim > 0 and yours.shape[-1] > 2 and _close(yours[..., 1:], theirs[..., :-1])


def _early(yours: Tensor, theirs: Tensor) -> bool:
    return _late(theirs, yours)


NumberRelation = tuple[Callable[[Tensor, Tensor], bool], str]
ZERO: NumberRelation = (lambda yours, theirs: bool((yours == 0).all()), "everything is 0")
OF_ALL_NUMBERS: tuple[NumberRelation, ...] = (
    (lambda yours, theirs: _close(-yours, theirs), "the sign is the other way round"),
    (_backwards, "the numbers are right, but stand in backward order"),
    (_late, "the numbers are right, but stand one place too late"),
    (_early, "the numbers are right, but stand one place too early"),
    (lambda yours, theirs: _close(yours.exp(), theirs), "this is the logarithm of what is due"),
    (lambda yours, theirs: _close(yours, theirs.exp()), "this is the exponential of what is due"),
    (lambda yours, theirs: _close(1 / yours, theirs), "this is 1 over what is due"),
    (
        lambda yours, theirs: _close(yours, theirs.abs()),
        "this is the absolute value of what is due",
    ),
    (lambda yours, theirs: _close(yours, theirs.square()), "this is the square of what is due"),
)


def _factor(pairs: Sequence[Pair]) -> str | None:
    """A factor between the two that is the same for all numbers of a case."""
    factors = []
    for yours, theirs in pairs:
        kept = theirs.abs() > 1e-9
        if not (yours.isfinite().all() and theirs.isfinite().all() and kept.any()):
            return None
        factor = (yours[kept] / theirs[kept]).median()
        if not _close(yours, factor * theirs):
            return None
        factors.append(factor.item())
    if all(abs(factor - factors[0]) < 1e-3 * abs(factors[0]) for factor in factors):
        return f"all numbers are {factors[0]:.3g} times what is due: look for a factor"
    if all(theirs.numel() == 1 for _, theirs in pairs):
        return None
    return "all numbers of a case are off by one factor: by what is divided, or multiplied?"


def _difference(pairs: Sequence[Pair]) -> str | None:
    """A difference between the two that is the same for all numbers of a case."""
    differences = []
    for yours, theirs in pairs:
        apart = yours - theirs
        if not apart.isfinite().all() or not _close(yours, theirs + apart.mean()):
            return None
        differences.append(apart.mean().item())
    if all(abs(d - differences[0]) < 1e-3 * abs(differences[0]) for d in differences):
        way = "high" if differences[0] > 0 else "low"
        return f"all numbers are {abs(differences[0]):.3g} too {way}"
    if all(theirs.numel() == 1 for _, theirs in pairs):
        return None
    return "all numbers of a case are off by the same amount: what is added, or missing?"


def _without_gradient(
    misses: Sequence[Miss], found: Sequence[Outcome], wanted: Sequence[Outcome]
) -> str | None:
    """Whether right values have no gradient where one is due, or one where none is."""
    if {miss.kind for miss in misses} != {"gradient"}:
        return None
    pairs = [(y.gradients, t.gradients) for y, t in zip(found, wanted, strict=True)]
    for name in wanted[0].gradients:
        there = [(bool(y[name].any()), bool(t[name].any())) for y, t in pairs if name in y]
        if len(there) == len(pairs) and set(there) == {(False, True)}:
            return f"no gradient reaches {name}, which is detached on the way"
        if len(there) == len(pairs) and set(there) == {(True, False)}:
            return f"a gradient flows into {name}, which has to be detached"
    return None


def _gradient_alone(misses: Sequence[Miss]) -> str | None:
    if {miss.kind for miss in misses} != {"gradient"}:
        return None
    return (
        "the values are right, and the gradient is not: look for a clamp, a rounding, a "
        "replaced nan or a detach on the way from the argument to the result"
    )


def _argument_at_fault(
    exercise: Exercise,
    missed: Iterable[int],
    misses: Sequence[Miss | None],
    outcomes: Sequence[Outcome],
) -> str | None:
    """An argument that is there in every missed case and in no other."""
    cases, wrong = exercise.cases(), set(missed)
    if len(wrong) == len(cases):
        return None
    names = _with_default(exercise)
    for name in names:
        given = {i for i, case in enumerate(cases) if case.arguments.get(name) is not None}
        if given == wrong:
            return f"everything is right without {name}, and nothing with it: how is it used?"
    labels = [cases[i].label for i in sorted(wrong)]
    if len(labels) <= 2:
        return f"everything is right but for: {'; '.join(labels)}"
    return None
