"""Wrong answers that equal a slip in some cases only, or none, are named nevertheless."""

from types import FunctionType

import pytest
import torch

from rlhf_lab import functional as F
from rlhf_lab.course.exercise import find_exercise
from rlhf_lab.course.grading import Judge


def _penalty(kl, kl_coef, mask=None, denominator=None):
    return kl_coef * kl.mean()


def _standardized(reward, eps=1e-5):
    return (reward - reward.mean()) / (reward.std() + eps)


def _in_place(x, mask=None):
    if mask is not None:
        x[~mask] = 0.0
    return x.sum(-1)


def _detached_logprobs(logprobs, advantages, mask=None):
    logprobs = F.zero_masked(F.at_least_float32(logprobs), mask).detach()
    return F.masked_mean(F.zero_masked(F.at_least_float32(advantages), mask) * logprobs, mask)


def _numbers(x, mask=None):
    return torch.randn(len(x), generator=torch.Generator().manual_seed(3)) + 0 * x.sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "written", "words"),
    [
        ("calc_kl_penalty", _penalty, "the mask is not used"),
        ("normalize_reward", _standardized, "a batch of one reward returns nan"),
        ("sequence_sum", _in_place, "this changes x in place"),
        ("policy_gradient_objective", _detached_logprobs, "no gradient reaches logprobs"),
    ],
)
def test_check_rejects_and_names_wrong_answers(name: str, written, words: str) -> None:
    verdict = Judge(find_exercise(name)).verdict(written)
    assert verdict.state == "differs" and words in (verdict.slip or "")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, mask: 0 * F.sequence_sum(x, mask), "0 everywhere"),
        (lambda x, mask: -F.sequence_sum(x, mask), "the sign is reversed"),
        (lambda x, mask: F.sequence_sum(x, mask).detach(), "the result has no gradient"),
        (lambda x, mask: 3 * F.sequence_sum(x, mask), "3 times the expected ones"),
        (lambda x, mask: x.exp().sum() * F.sequence_sum(x, mask), "off by a constant factor"),
        (lambda x, mask: F.sequence_sum(x, mask) + 2, "2 too high"),
        (lambda x, mask: F.sequence_sum(x, mask).exp(), "the exponential of the result"),
        (lambda x, mask: F.sequence_sum(x, mask).flip(0), "in reverse order"),
        (lambda x, mask: F.sequence_sum(x, mask).abs(), "the absolute value"),
        (_numbers, None),
    ],
)
def test_relations_to_the_right_numbers_are_named(change, words: str | None) -> None:
    written = FunctionType(change.__code__, globals(), "sequence_sum", (None,))
    verdict = Judge(find_exercise("sequence_sum")).verdict(written)
    assert verdict.state == "differs" and (words or "") in (verdict.slip or "")
    assert words or verdict.slip is None
