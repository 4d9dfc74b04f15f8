"""What is said of wrong answers that no slip explains, and of those that call the package's own."""

import inspect
from types import FunctionType

import pytest
import torch

from rlhf_lab import functional as F
from rlhf_lab.course.grading import Judge, verdict_on
from rlhf_lab.course.mutants import compiled_mutant, source_of
from rlhf_lab.course.registry import all_exercises, find_exercise


@pytest.fixture(scope="module")
def sums() -> Judge:
    """The judge of sequence_sum, whose result is [batch]."""
    return Judge(find_exercise("sequence_sum"))


def said(judge_of: Judge, written: FunctionType) -> str:
    """The words on a wrong answer."""
    verdict = judge_of.verdict(written)
    assert verdict.state == "differs"
    return verdict.slip or ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, mask: F.sequence_sum(x, mask)[:, None], "an axis of size 1 too many"),
        (lambda x, mask: F.sequence_sum(x, mask).sum(), "over an axis that should stay"),
        (lambda x, mask: F.sequence_sum(x, mask)[1:], "axis 0 of result has 1 entries too few"),
        (lambda x, mask: 3 * F.sequence_sum(x, mask), "3 times the result"),
        (lambda x, mask: F.sequence_sum(x, mask) + 2, "2 too high"),
        (lambda x, mask: F.sequence_sum(x, mask).exp(), "the exponential of the result"),
        (lambda x, mask: F.sequence_sum(x, mask).flip(0), "in reverse order"),
        (lambda x, mask: F.sequence_sum(x, mask).abs(), "the absolute value"),
    ],
)
def test_a_relation_to_the_right_numbers_is_named(sums: Judge, change, words: str) -> None:
    """The masks are applied by a copy: an answer may not call the package's own."""
    own = compiled_mutant(find_exercise("sequence_sum").reference, source_of(F.sequence_sum), {})
    kept = {"F": type("F", (), {"sequence_sum": staticmethod(own)})}
    wrong = FunctionType(change.__code__, kept, "sequence_sum", (None,))
    assert words in said(sums, wrong)


def test_none_that_is_used_is_named_by_its_argument(sums: Judge) -> None:
    def written(x, mask=None):
        return torch.stack([row[real].sum() for row, real in zip(x, mask, strict=True)])

    assert said(sums, written).startswith("mask is None here")


def test_numbers_without_a_relation_are_not_explained(sums: Judge) -> None:
    def written(x, mask=None):
        return torch.randn(len(x), generator=torch.Generator().manual_seed(3)) + 0 * x.sum()

    assert said(sums, written) == ""


def test_an_answer_that_calls_the_packages_own_does_not_pass() -> None:
    def sequence_sum(x, mask=None):
        return F.sequence_sum(x, mask)

    verdict = verdict_on(find_exercise("sequence_sum"), sequence_sum)
    assert verdict.state == "differs"
    assert "the package's own sequence_sum" in verdict.slip


def test_a_class_that_inherits_what_is_to_be_written_does_not_pass() -> None:
    exercise = find_exercise("AdaptiveKLController")
    inherits = type("AdaptiveKLController", (exercise.reference,), {})
    assert "the package's own update" in verdict_on(exercise, inherits).slip


@pytest.mark.slow
@pytest.mark.parametrize("exercise", all_exercises(), ids=lambda exercise: exercise.name)
def test_a_copy_of_the_packages_own_is_no_call_of_it(exercise) -> None:
    reference = inspect.unwrap(exercise.reference)
    copy = compiled_mutant(exercise.reference, source_of(exercise.reference), {})
    assert copy is not reference
    assert verdict_on(exercise, copy).state == "passed"
