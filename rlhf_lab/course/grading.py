"""Grading: compare a function with its reference in results, gradients and arguments."""

import contextlib
import functools
import inspect
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from rlhf_lab.course.containment import Stopped, contained
from rlhf_lab.course.error_advice import error_advice, is_return_type_error
from rlhf_lab.course.exercise import Answer, Case, Exercise
from rlhf_lab.course.mutants import known_mistakes
from rlhf_lab.course.outcomes import Difference, Outcome, compare_outcomes, observe
from rlhf_lab.course.relations import changed_arguments, strong_relation, weak_relation

SECONDS_PER_READING = 5.0


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


class KnownMistake:
    """A mistake and its outcomes, computed when needed."""

    def __init__(self, judge: "Judge", says: str, fn: Answer) -> None:
        self.says = says
        self._judge, self._fn = judge, fn
        self._outcomes: dict[int, Outcome] = {}

    def agrees(self, i: int, outcome: Outcome) -> bool:
        """Return True if the mistake has this outcome on case i."""
        return compare_outcomes(outcome, self._outcome(i)) is None

    def shows(self, i: int) -> bool:
        """Return True if the mistake shows on case i."""
        return compare_outcomes(self._outcome(i), self._judge.expected[i]) is not None

    def _outcome(self, i: int) -> Outcome:
        if i not in self._outcomes:
            self._outcomes[i] = observe(self._judge.exercise, self._fn, self._judge.cases[i])
        return self._outcomes[i]


class Judge:
    """Comparison of functions with the reference of one exercise."""

    def __init__(self, exercise: Exercise) -> None:
        self.exercise = exercise
        self.cases = exercise.cases()

    @functools.cached_property
    def expected(self) -> list[Outcome]:
        """The reference's outcome on each case."""
        return self._outcomes(self.exercise.reference)

    @functools.cached_property
    def known(self) -> list[KnownMistake]:
        """The known mistakes: slips first, then generic ones."""
        return [KnownMistake(self, says, fn) for says, fn in known_mistakes(self.exercise)]

    def verdict(self, fn: Answer) -> Verdict:
        """Compare a function on all cases, and name its mistake if it is a known one.

        1. Call it on each case. A stub ends the check, and so does a call that does not return.
        2. Compare results, gradients and arguments. If all are right, call it once more to see
           that it does not call the package's own function.
        3. Otherwise find the known mistake with the same outcomes, or a relation to the right ones.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcomes: list[Outcome] = []
            try:
                for case in self.cases:
                    outcomes.append(observe(self.exercise, fn, case))
            except NotImplementedError:
                return Verdict("unwritten", len(self.cases))
            except Stopped as stop:  # not called again: each case would take as long
                rows = (("raised", str(stop), "no error"),)
                difference = Difference("error", rows, self.cases[len(outcomes)])
                return Verdict("differs", len(self.cases), difference)
            differences = self._compare(outcomes)
            first = next((difference for difference in differences if difference), None)
            if first is None:
                return self._borrowed(fn) or Verdict("passed", len(self.cases))
            return Verdict(
                "differs", len(self.cases), first, self._explain(fn, outcomes, differences)
            )

    def _outcomes(self, fn: Answer) -> list[Outcome]:
        return [observe(self.exercise, fn, case) for case in self.cases]

    def _compare(self, outcomes: list[Outcome]) -> list[Difference | None]:
        return list(map(compare_outcomes, outcomes, self.expected, self.cases))

    def _explain(
        self, fn: Answer, outcomes: list[Outcome], differences: list[Difference | None]
    ) -> str | None:
        first = next(i for i, difference in enumerate(differences) if difference)
        error, bare = outcomes[first].error, inspect.unwrap(fn)
        if is_return_type_error(error) and bare is not fn:  # it hides the numbers: call without it
            try:
                outcomes = self._outcomes(bare)
            except (Stopped, NotImplementedError):
                return error_advice(error)
            differences = self._compare(outcomes)
        wrong = [i for i, difference in enumerate(differences) if difference]
        if not wrong:  # only the type differs from the annotation
            return error_advice(error)
        found = [differences[i] for i in wrong]
        return (
            self._recognize(outcomes, differences)
            or changed_arguments(found)
            or (None if error else self._read(fn, self.cases[first]))
            or strong_relation(
                self.exercise, found, [(outcomes[i], self.expected[i]) for i in wrong]
            )
            or (error_advice(error) if error else None)
            or weak_relation(self.exercise, found)
        )

    def _read(self, fn: Answer, case: Case) -> str | None:
        if self.exercise.reads is None:
            return None
        with contextlib.suppress(Exception, Stopped), contained(SECONDS_PER_READING):
            return self.exercise.reads(fn, case)
        return None

    def _borrowed(self, fn: Answer) -> Verdict | None:
        case = self.cases[0]
        with _calls_of_reference(self.exercise, fn) as called, contextlib.suppress(Stopped):
            observe(self.exercise, fn, case)  # slower while profiled
        if not called:
            return None
        name = min(called)
        rows = (("it calls", f"the package's own {name} is called", "your own code"),)
        slip = f"this calls the package's own {name}: write its body yourself"
        return Verdict("differs", len(self.cases), Difference("error", rows, case), slip)

    def _recognize(
        self, outcomes: list[Outcome], differences: list[Difference | None]
    ) -> str | None:
        """Find the known mistake that agrees with the outcomes in most cases.

        It must agree at the first difference. It must also explain half of the differences among
        the cases with the same arguments as the first, or agree wherever no error is raised (in
        two cases or more), or agree in every case in which it shows (others may add to it).
        """
        wrong = [i for i, difference in enumerate(differences) if difference]
        names = [case.arguments.keys() for case in self.cases]
        alike = [i for i in wrong if names[i] == names[wrong[0]]]
        finished = [i for i, outcome in enumerate(outcomes) if not outcome.error]
        best, most = None, 0
        for known in self.known:
            if not known.agrees(wrong[0], outcomes[wrong[0]]):
                continue
            agrees = [known.agrees(i, outcome) for i, outcome in enumerate(outcomes)]
            half = 2 * sum(agrees[i] for i in alike) >= len(alike)
            but_for_errors = len(finished) > 1 and all(agrees[i] for i in finished)
            is_whole = all(agreed or not known.shows(i) for i, agreed in enumerate(agrees))
            if (half or but_for_errors or is_whole) and sum(agrees) > most:
                best, most = known.says, sum(agrees)
        return best


@contextlib.contextmanager
def _calls_of_reference(exercise: Exercise, fn: Answer) -> Iterator[set[str]]:
    """Collect the names of the package's own functions, or of the learner's methods, that run."""
    called: set[str] = set()
    reference = inspect.unwrap(exercise.reference)
    if inspect.unwrap(fn) is reference:  # the package's own function may be checked
        yield called
        return
    methods = [vars(reference)[name] for name in exercise.methods]
    codes = {inspect.unwrap(part).__code__ for part in methods or [reference]}

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in codes:
            called.add(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield called
    finally:
        sys.setprofile(before)


def verdict_on(exercise: Exercise, fn: Answer) -> Verdict:
    """Compare one function with the reference of an exercise; see `Judge.verdict`."""
    return Judge(exercise).verdict(fn)
