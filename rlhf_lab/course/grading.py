"""Grading: compare a function with its reference in results, gradients and untouched arguments."""

import contextlib
import functools
import inspect
import warnings
from dataclasses import dataclass
from typing import Literal

from rlhf_lab.course.borrowed import watched
from rlhf_lab.course.containment import Stopped, contained
from rlhf_lab.course.exercise import Answer, Case, Exercise
from rlhf_lab.course.mutants import RETURNS_ZERO, known_mistakes
from rlhf_lab.course.outcomes import Miss, Outcome, compare_outcomes, observe
from rlhf_lab.course.own_code import uses_its_arguments
from rlhf_lab.course.readings import read_error, returned_wrong_shape
from rlhf_lab.course.relations import changed_in_place, relation, shapes, weak_relation

SECONDS_PER_READING = 5.0


@dataclass(frozen=True)
class Verdict:
    """What `check` found.

    Args:
        state: "unwritten" for a stub.
        cases: how many were compared.
        miss: the first difference, if there is one.
        slip: the known mistake that gives the same results, in plain words.
    """

    state: Literal["passed", "differs", "unwritten"]
    cases: int
    miss: Miss | None = None
    slip: str | None = None


class KnownMistake:
    """A mistake by what it is called, and what it does on a case, worked out where it is asked."""

    def __init__(self, judge: "Judge", says: str, fn: Answer) -> None:
        self.says = says
        self._judge, self._fn = judge, fn
        self._outcomes: dict[int, Outcome] = {}

    def agrees(self, i: int, outcome: Outcome) -> bool:
        """Whether it does on case i what an answer did."""
        return compare_outcomes(outcome, self._outcome(i)) is None

    def misses(self, i: int) -> bool:
        """Whether it goes wrong on case i."""
        return compare_outcomes(self._outcome(i), self._judge.expected[i]) is not None

    def _outcome(self, i: int) -> Outcome:
        if i not in self._outcomes:
            case = self._judge.cases[i]
            self._outcomes[i] = observe(self._judge.exercise, self._fn, case)
        return self._outcomes[i]


class Judge:
    """Compares functions with the reference of an exercise; what it knows is worked out once."""

    def __init__(self, exercise: Exercise) -> None:
        self.exercise = exercise
        self.cases = exercise.cases()

    @functools.cached_property
    def expected(self) -> list[Outcome]:
        """What the reference does on each case."""
        return self._outcomes(self.exercise.reference)

    def _outcomes(self, fn: Answer) -> list[Outcome]:
        return [observe(self.exercise, fn, case) for case in self.cases]

    @functools.cached_property
    def known(self) -> list[KnownMistake]:
        """The known mistakes, slips before generic mistakes."""
        return [KnownMistake(self, says, fn) for says, fn in known_mistakes(self.exercise)]

    def verdict(self, fn: Answer) -> Verdict:
        """Compare a function on all cases, and name the slip if it is a known one.

        1. Call it on each case; a stub ends it, and so does a call that does not come back.
        2. Compare results, gradients and arguments. Where all are right, call it once more, to see
           that it does not hand the work to the package's own function.
        3. At a miss, look for the known mistake that behaves the same, or else for what the wrong
           numbers have to do with the right ones.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcomes: list[Outcome] = []
            try:
                for case in self.cases:
                    outcomes.append(observe(self.exercise, fn, case))
            except NotImplementedError:
                return Verdict("unwritten", len(self.cases))
            except Stopped as stop:  # not called again: it would take as long on every case
                rows = (("raised", str(stop), "no error"),)
                miss = Miss("error", rows, self.cases[len(outcomes)])
                return Verdict("differs", len(self.cases), miss)
            pairs = zip(outcomes, self.expected, self.cases, strict=True)
            misses = [compare_outcomes(*each) for each in pairs]
            first = next((miss for miss in misses if miss), None)
            if first is None:
                return self._borrowed(fn) or Verdict("passed", len(self.cases))
            return Verdict("differs", len(self.cases), first, self._likely(fn, outcomes, misses))

    def _likely(self, fn: Answer, outcomes: list[Outcome], misses: list[Miss | None]) -> str | None:
        """What is wrong in words: known mistakes first, then what costs more to find.

        What comes back in a wrong shape is an error of the type check, which hides it: the answer
        is called again without.
        """
        first = next(i for i, miss in enumerate(misses) if miss)
        error, bare = outcomes[first].error, inspect.unwrap(fn)
        if returned_wrong_shape(error) and bare is not fn:
            try:
                outcomes = [observe(self.exercise, bare, case) for case in self.cases]
            except (Stopped, NotImplementedError):
                return read_error(self.exercise, error, self.cases[first])
            pairs = zip(outcomes, self.expected, self.cases, strict=True)
            misses = [compare_outcomes(*each) for each in pairs]
        if not any(misses):  # only the type is not the promised one
            return read_error(self.exercise, error, self.cases[first])
        return (
            self._recognize(fn, outcomes, misses)
            or changed_in_place(misses)
            or (not error and self._read(fn, self.cases[first]))
            or relation(self.exercise, outcomes, self.expected, misses)
            or shapes(self.exercise, outcomes, self.expected, misses)
            or (error and read_error(self.exercise, error, self.cases[first]))
            or weak_relation(self.exercise, outcomes, self.expected, misses)
        )

    def _read(self, fn: Answer, case: Case) -> str | None:
        """What the exercise itself makes of a wrong answer."""
        if self.exercise.reads is None:
            return None
        with contextlib.suppress(Exception, Stopped), contained(SECONDS_PER_READING):
            return self.exercise.reads(fn, case)
        return None

    def _borrowed(self, fn: Answer) -> Verdict | None:
        """What is said of an answer that calls the package's; None where it does not."""
        case = self.cases[0]
        with watched(self.exercise, fn) as called, contextlib.suppress(Stopped):
            observe(self.exercise, fn, case)  # slower under the watch
        if not called:
            return None
        name = min(called)
        rows = (("it calls", f"the package's own {name} is called", "your own code"),)
        slip = f"this hands the work to the package's own {name}: write what it does yourself"
        return Verdict("differs", len(self.cases), Miss("error", rows, case), slip)

    def _recognize(
        self, fn: Answer, outcomes: list[Outcome], misses: list[Miss | None]
    ) -> str | None:
        """The known mistake that agrees with what was found in most cases.

        1. It must agree at the first miss.
        2. It must explain at least half of the misses among the cases with the same arguments as
           the first (an argument that comes later may be got wrong by itself), or be there whole:
           agree in every case that it would make miss by itself (others may come on top of it),
           or in all that raise no error, which are two or more.
        3. Of several, the one that agrees in most cases overall.
        4. Code that uses its arguments may give 0 everywhere, and does not return 0 as such.
        """
        uses = uses_its_arguments(fn)
        missed = [i for i, miss in enumerate(misses) if miss]
        given = [case.arguments.keys() for case in self.cases]
        alike = [i for i in missed if given[i] == given[missed[0]]]
        finished = [i for i, outcome in enumerate(outcomes) if not outcome.error]
        best, most = None, 0
        for known in self.known:
            if uses and known.says == RETURNS_ZERO:
                continue
            if not known.agrees(missed[0], outcomes[missed[0]]):
                continue
            agrees = [known.agrees(i, outcome) for i, outcome in enumerate(outcomes)]
            half = 2 * sum(agrees[i] for i in alike) >= len(alike)
            but_for_errors = len(finished) > 1 and all(agrees[i] for i in finished)
            is_whole = all(agreed or not known.misses(i) for i, agreed in enumerate(agrees))
            if (half or but_for_errors or is_whole) and sum(agrees) > most:
                best, most = known.says, sum(agrees)
        return best


def verdict_on(exercise: Exercise, fn: Answer) -> Verdict:
    """Compare one function with the reference of an exercise; see `Judge.verdict`."""
    return Judge(exercise).verdict(fn)
