"""Reward shaping: normalize, clip and penalize rewards."""

import math

import pytest
import torch
from torch import tensor

from rlhf_lab import functional as F

NAN = float("nan")
MASK = tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()


def test_normalize_reward_matches_hand_computed():
    # mean 2, unbiased std sqrt 2, plus eps outside the root
    scale = math.sqrt(2) + 1e-5
    assert F.normalize_reward(tensor([1.0, 3.0])).tolist() == pytest.approx([-1 / scale, 1 / scale])
    wide = F.normalize_reward(tensor([0.0, 2.0]), eps=1.0)
    assert wide.tolist() == pytest.approx([-1 / (1 + math.sqrt(2)), 1 / (1 + math.sqrt(2))])
    # squares of 3e4 exceed float16
    half = F.normalize_reward(tensor([-3e4, 3e4], dtype=torch.float16))
    assert half.tolist() == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)])
    # mean .99915, std 1.291e-4: float32 keeps the order
    near = F.normalize_reward(tensor([0.9990, 0.9991, 0.9992, 0.9993]))
    assert near.tolist() == pytest.approx([-1.078, -0.359, 0.359, 1.078], abs=3e-3)


@pytest.mark.parametrize("rewards", [[0.7], [0.7] * 8, [1 / 3] * 8, [-123.456] * 8, [1e-30] * 8])
def test_normalize_reward_returns_zero_for_equal_rewards(rewards):
    """The float32 mean of eight 0.7 is 0.70000005, and 6e-8 / (0 + eps) is 0.006."""
    x = tensor(rewards, requires_grad=True)
    got = F.normalize_reward(x)
    assert not got.any()
    (got * torch.arange(len(rewards))).sum().backward()
    assert x.grad.isfinite().all()


def test_clip_and_labels_match_hand_computed():
    assert F.clip_rewards(tensor([-11.0, 0.5, 3e38, math.inf]), 10.0).tolist() == [-10, 0.5, 10, 10]
    assert F.rewards_over_labels(tensor([3.0, 1.0]), tensor([1.0, 2.5])).tolist() == [2.0, -1.5]


def test_flawed_responses_match_hand_computed():
    finished = tensor([False, True, True, True])
    assert F.flawed_responses(MASK, finished).tolist() == [True, False, False, False]
    # lengths 4, 2, 1, 0
    assert F.flawed_responses(MASK, min_response_length=2).tolist() == [False, False, True, True]
    both = F.flawed_responses(MASK, finished, min_response_length=1)
    assert both.tolist() == [True, False, False, True]
    assert not F.flawed_responses(MASK).any()


def test_penalize_responses_matches_hand_computed():
    rewards = tensor([5.0, NAN, -4.0], requires_grad=True)
    flawed = tensor([False, True, True])
    got = F.penalize_responses(rewards, flawed, -3.0)
    assert got.tolist() == [5.0, -3.0, -3.0]
    got.sum().backward()
    assert rewards.grad.tolist() == [1.0, 0.0, 0.0]
    added = F.penalize_responses(tensor([5.0, 1.0]), flawed[:2], -3.0, replace=False)
    assert added.tolist() == [5.0, -2.0]


def test_overlong_penalty_matches_hand_computed():
    # lengths 4, 2, 1, 0; the last `buffer` of max_len tokens
    assert F.overlong_penalty(MASK, max_len=4, buffer=2).tolist() == [-1.0, 0.0, 0.0, 0.0]
    assert F.overlong_penalty(MASK, 4, 4).tolist() == [-1.0, -0.5, -0.25, 0.0]
    assert F.overlong_penalty(MASK, 3, 2).tolist() == [-1.0, -0.5, 0.0, 0.0]
    for buffer in (0, 5):
        with pytest.raises(ValueError, match=f"buffer must .*max_len=4, got {buffer}"):
            F.overlong_penalty(MASK, 4, buffer)
