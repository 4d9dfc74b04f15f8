"""Explanation of a wrong answer that no list foresees: a mutant of the reference that agrees.

It is looked for only where neither a known mistake nor a plain relation explains the answer, so
that a right answer, and a common wrong one, cost nothing.
"""

import itertools
import time
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rlhf_lab.course.containment import Stopped
from rlhf_lab.course.exercise import Answer, Case, Exercise, Slip
from rlhf_lab.course.handling import handlings, ignored
from rlhf_lab.course.mutants import mutant
from rlhf_lab.course.outcomes import Miss, Outcome, compare_outcomes, observe
from rlhf_lab.course.repairs import repairs
from rlhf_lab.course.rewrites import rewrites

SECONDS = 5.0
"""How long to look for an explanation, in processor seconds."""
SECONDS_PER_MUTANT = 2.0


def explained(
    exercise: Exercise,
    fn: Answer,
    cases: Sequence[Case],
    outcomes: Sequence[Outcome],
    expected: Sequence[Outcome],
    misses: Sequence[Miss | None],
) -> str | None:
    """What was done, in words, from a mutant that agrees with an answer.

    1. Leave alone errors, shapes, and outcomes that many mutants share: facts of yes and no, nan
       alone.
    2. Try mutants in the case that is missed first, and those that agree there in all others.
    3. Take the first that agrees everywhere. Or else take a change of the answer's own code that
       makes it right in every case; or the mutant that agrees in most of the cases: in half of
       those that are missed and alike, and in two that it misses itself.
    """
    missed = [i for i, miss in enumerate(misses) if miss]
    best, is_all = None, False
    first = outcomes[missed[0]]
    is_shape = misses[missed[0]].kind == "shape"
    if not (first.error or is_shape) and _is_telling(first, expected[missed[0]]):
        best, is_all = _mutant_like(exercise, cases, outcomes, expected, missed)
    if is_all:
        return best
    repaired = _repaired(exercise, fn, cases, expected, missed)
    return repaired or (best and f"{best}; correct this first, and then see what is left")


def _mutant_like(
    exercise: Exercise,
    cases: Sequence[Case],
    outcomes: Sequence[Outcome],
    expected: Sequence[Outcome],
    missed: Sequence[int],
) -> tuple[str | None, bool]:
    """The words of the mutant that agrees best, and whether it agrees everywhere."""
    first = missed[0]
    alike = [i for i in missed if cases[i].arguments.keys() == cases[first].arguments.keys()]
    deadline, best, most = time.process_time() + SECONDS, None, 1
    for says, fn in candidates(exercise):
        if time.process_time() > deadline:
            break
        if not _agrees(exercise, fn, cases[first], outcomes[first], expected[first]):
            continue
        pairs = zip(cases, outcomes, strict=True)
        agreed = [i for i, (c, out) in enumerate(pairs) if _agrees(exercise, fn, c, out, None)]
        if len(agreed) == len(cases):
            return says, True
        wrong = [i for i in agreed if i in missed]
        if len(wrong) > most and 2 * sum(i in agreed for i in alike) >= len(alike):
            best, most = says, len(wrong)
    return best, False


def _repaired(
    exercise: Exercise,
    fn: Answer,
    cases: Sequence[Case],
    expected: Sequence[Outcome],
    missed: Sequence[int],
) -> str | None:
    """What is wrong in the learner's own code, if one change makes it right.

    In every case: a change that helps in some cases alone may fit by coincidence, as a softmax over
    an axis of size 1 does.
    """
    deadline = time.process_time() + SECONDS
    for says, right in repairs(exercise, fn):
        if time.process_time() > deadline:
            break
        if not _agrees(exercise, right, cases[missed[0]], expected[missed[0]], None):
            continue
        pairs = zip(cases, expected, strict=True)
        if all(_agrees(exercise, right, case, wanted, None) for case, wanted in pairs):
            return says
    return None


def candidates(exercise: Exercise) -> Iterator[tuple[str, Answer]]:
    """Mutants with their words, the likeliest first: singles, then two known mistakes at once."""
    seen: set[str] = set()
    for says, fn in itertools.chain(handlings(exercise), rewrites(exercise)):
        yield f"this gives what it would if {says}", fn
    slips = [slip for slip in exercise.slips if not slip.raises]
    for one, two in itertools.combinations(slips, 2):
        says = f"two things at once: {one.says}; and {two.says}"
        if says in seen or one.says == two.says:
            continue
        seen.add(says)
        both = _both(exercise, one, two)
        if both is not None:
            yield says, both
    for slip in slips:
        wrong = _made(exercise, slip)
        if wrong is None:
            continue
        for says, fn in ignored(exercise, wrong):
            yield f"two things at once: {slip.says}; and it is as if {says}", fn


def _made(exercise: Exercise, slip: Slip) -> Answer | None:
    try:
        return mutant(exercise, slip)
    except ValueError:  # stale, which is for the author's gate to tell
        return None


def _both(exercise: Exercise, one: Slip, two: Slip) -> Answer | None:
    """The reference with two slips in it; None where they edit the same place."""
    if any(a in b or b in a for a in one.edits for b in two.edits):
        return None
    try:
        return mutant(exercise, Slip("", {**one.edits, **two.edits}))
    except Exception:
        return None


def _is_telling(outcome: Outcome, expected: Outcome) -> bool:
    """Whether agreement with an outcome is no coincidence: it has numbers or lists, not all nan."""
    values = list(outcome.results.values())
    tensors = [v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.numel()]
    if any(v.is_meta or not v.isfinite().any() for v in tensors):
        return False
    kinds = (float, list, Tensor)
    return any(isinstance(v, kinds) for v in expected.results.values())


def _agrees(
    exercise: Exercise, fn: Answer, case: Case, outcome: Outcome, expected: Outcome | None
) -> bool:
    """Whether a mutant does the same on a case; where `expected` is given, and does not meet it."""
    other = _outcome(exercise, fn, case)
    if other is None or compare_outcomes(outcome, other):
        return False
    return expected is None or compare_outcomes(other, expected) is not None


def _outcome(exercise: Exercise, fn: Answer, case: Case) -> Outcome | None:
    """What a mutant does on a case; None for an error, or where it does not come back."""
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            other = observe(exercise, fn, case, SECONDS_PER_MUTANT)
    except (Stopped, NotImplementedError):
        return None
    return None if other.error else other
