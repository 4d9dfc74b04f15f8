"""Relations that `check` reports for wrong answers that no slip explains."""

from types import FunctionType

import pytest
import torch

from rlhf_lab import functional as F
from rlhf_lab.course.exercise import find_exercise
from rlhf_lab.course.grading import Judge


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
        (lambda x, mask: 0 * F.sequence_sum(x, mask), "0 everywhere"),
        (lambda x, mask: -F.sequence_sum(x, mask), "the sign is reversed"),
        (lambda x, mask: F.sequence_sum(x, mask).detach(), "the result has no gradient"),
        (lambda x, mask: 3 * F.sequence_sum(x, mask), "3 times the expected ones"),
        (lambda x, mask: F.sequence_sum(x, mask) + 2, "2 too high"),
        (lambda x, mask: F.sequence_sum(x, mask).exp(), "the exponential of the result"),
        (lambda x, mask: F.sequence_sum(x, mask).flip(0), "in reverse order"),
        (lambda x, mask: F.sequence_sum(x, mask).abs(), "the absolute value"),
    ],
)
def test_a_relation_to_the_right_numbers_is_named(sums: Judge, change, words: str) -> None:
    assert words in said(sums, FunctionType(change.__code__, {"F": F}, "sequence_sum", (None,)))


def test_numbers_without_a_relation_are_not_explained(sums: Judge) -> None:
    def written(x, mask=None):
        return torch.randn(len(x), generator=torch.Generator().manual_seed(3)) + 0 * x.sum()

    assert said(sums, written) == ""
