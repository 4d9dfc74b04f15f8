"""Relations of a wrong answer to the right one, named where no known mistake explains it.

A relation is named only if it holds in every case that is missed (so that it is not one number's
coincidence), and says what is seen, not what was meant.
"""

import inspect
import itertools
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from rlhf_lab.course.exercise import Case, Exercise
from rlhf_lab.course.number_relations import OF_ALL_NUMBERS, ZERO, Pair, is_close, number_relation
from rlhf_lab.course.outcomes import Miss, Outcome


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
        number_relation(found, wanted, OF_ALL_NUMBERS),
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
    zero = number_relation([outcomes[i] for i in missed], [expected[i] for i in missed], (ZERO,))
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
            is_close(yours.results.get(first), theirs.results.get(second))
            and is_close(yours.results.get(second), theirs.results.get(first))
            and not is_close(theirs.results.get(first), theirs.results.get(second))
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
