"""Grading: compare a function with its reference in results, gradients and arguments."""

import functools
import inspect
import warnings
from dataclasses import dataclass
from typing import Literal

from rlhf_lab.course.containment import Stopped
from rlhf_lab.course.error_advice import error_advice
from rlhf_lab.course.exercise import Answer, Exercise
from rlhf_lab.course.mutants import known_mistakes
from rlhf_lab.course.outcomes import Difference, Outcome, compare_outcomes, observe
from rlhf_lab.course.relations import strong_relation, weak_relation

Differences = list[Difference | None]  # one per case


@dataclass(frozen=True)
class Verdict:
    """The result of `check`.

    Args:
        state: "unwritten" for a stub.
        cases: number of cases compared.
        difference: the first difference, if any.
        slip: the mistake in plain words, if known.
    """

    state: Literal["passed", "differs", "unwritten"]
    cases: int
    difference: Difference | None = None
    slip: str | None = None


class Judge:
    """Comparison of functions with the reference of one exercise."""

    def __init__(self, exercise: Exercise) -> None:
        self.exercise = exercise
        self.cases = exercise.cases()
        self._known_outcomes: dict[tuple[int, int], Outcome] = {}  # by mistake and case

    @functools.cached_property
    def expected(self) -> list[Outcome]:
        """The reference's outcome on each case; raises RuntimeError if the reference raises."""
        found = [self._observe(self.exercise.reference, label) for label in self.cases]
        for label, outcome in zip(self.cases, found, strict=True):
            if outcome.error and not self.exercise.errors_tried:
                raise RuntimeError(f"{self.exercise.name}, {label}: {outcome.error}")
        return found

    @functools.cached_property
    def known(self) -> list[tuple[str, Answer]]:
        """The known mistakes with their descriptions."""
        return known_mistakes(self.exercise)

    def verdict(self, fn: Answer) -> Verdict:
        """Compare a function on all cases, and name its mistake if it is a known one.

        1. Call it on each case. A stub ends the check, and so does a call that does not return.
        2. Compare results, gradients and arguments.
        3. Find the known mistake with the same outcomes, or a relation to the right ones.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcomes: list[Outcome] = []
            try:
                for label in self.cases:
                    outcomes.append(self._observe(fn, label))
            except NotImplementedError:
                return Verdict("unwritten", len(self.cases))
            except Stopped as stop:  # not called again: each case would take as long
                rows = (("raised", str(stop), "no error"),)
                difference = Difference("error", rows, list(self.cases)[len(outcomes)])
                return Verdict("differs", len(self.cases), difference)
            differences = self._compare(outcomes)
            first = next(filter(None, differences), None)
            if first is None:
                return Verdict("passed", len(self.cases))
            explanation = self._explain(fn, outcomes, differences)
            return Verdict("differs", len(self.cases), first, explanation)

    def _observe(self, fn: Answer, label: str) -> Outcome:
        return observe(self.exercise, fn, self.cases[label])

    def _compare(self, outcomes: list[Outcome]) -> Differences:
        return list(map(compare_outcomes, outcomes, self.expected, self.cases))

    def _explain(self, fn: Answer, outcomes: list[Outcome], differences: Differences) -> str | None:
        error = next(outcomes[i].error for i, difference in enumerate(differences) if difference)
        bare = inspect.unwrap(fn)
        # a wrong type of the return value hides the numbers: call without the check of types
        if "checking the return value of" in (error or "") and bare is not fn:
            try:
                outcomes = [self._observe(bare, label) for label in self.cases]
            except (Stopped, NotImplementedError):
                return error_advice(error)
            differences = self._compare(outcomes)
        wrong = [i for i, difference in enumerate(differences) if difference]
        if not wrong:  # only the type differs from the annotation
            return error_advice(error)
        found = [differences[i] for i in wrong]
        pairs = [(outcomes[i], self.expected[i]) for i in wrong]
        return (
            self._recognize(outcomes, wrong)
            or strong_relation(found, pairs)
            or (error_advice(error) if error else None)
            or weak_relation(self.exercise, found)
        )

    def _recognize(self, outcomes: list[Outcome], wrong: list[int]) -> str | None:
        """Find the known mistake that agrees with the outcomes in most cases.

        It must agree at the first difference. It must also explain half of the differences among
        the cases with the same arguments as the first, or agree wherever no error is raised (in
        two cases or more), or agree in every case in which it shows (others may add to it).
        """
        names = [arguments.keys() for arguments in self.cases.values()]
        alike = [i for i in wrong if names[i] == names[wrong[0]]]
        finished = [i for i, outcome in enumerate(outcomes) if not outcome.error]
        best, most = None, 0
        for number, (words, _) in enumerate(self.known):
            if not self._agrees(number, wrong[0], outcomes[wrong[0]]):
                continue
            agrees = [self._agrees(number, i, outcome) for i, outcome in enumerate(outcomes)]
            half = 2 * sum(agrees[i] for i in alike) >= len(alike)
            but_for_errors = len(finished) > 1 and all(agrees[i] for i in finished)
            is_whole = all(
                agreed or self._agrees(number, i, self.expected[i])
                for i, agreed in enumerate(agrees)
            )
            if (half or but_for_errors or is_whole) and sum(agrees) > most:
                best, most = words, sum(agrees)
        return best

    def _agrees(self, number: int, i: int, outcome: Outcome) -> bool:
        """Return True if a known mistake has this outcome on case i."""
        if (number, i) not in self._known_outcomes:
            known = self._observe(self.known[number][1], list(self.cases)[i])
            self._known_outcomes[number, i] = known
        return compare_outcomes(outcome, self._known_outcomes[number, i]) is None
