"""Normalised rewards."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from rlhf_lab.functional import normalize_reward


def test_normalize_reward_by_hand():
    # mean 2, unbiased std sqrt((1 + 1) / 1) = sqrt 2, plus 1e-5 outside the root
    scale = math.sqrt(2) + 1e-5
    assert normalize_reward(tensor([1.0, 3.0])).tolist() == pytest.approx([-1 / scale, 1 / scale])
    # eps outside the root: std(0, 2) = sqrt 2; (0 - 1) / (sqrt 2 + 1)
    got = normalize_reward(tensor([0.0, 2.0]), eps=1.0)
    assert got.tolist() == pytest.approx([-1 / (1 + math.sqrt(2)), 1 / (1 + math.sqrt(2))])


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8))
@settings(max_examples=50, deadline=None)
def test_equals_numpy_in_float64(rewards):
    reward = np.array(rewards)
    expected = (reward - reward.mean()) / (reward.std(ddof=1) + 1e-5)
    got = normalize_reward(tensor(rewards, dtype=torch.float64)).numpy()
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_a_single_reward_is_zero_and_not_nan():
    one = tensor([0.7], requires_grad=True)
    normalize_reward(one).sum().backward()
    assert normalize_reward(one).tolist() == [0.0] and one.grad.isfinite().all()


def test_equal_rewards_are_zero_with_finite_gradient():
    rewards = tensor([0.5, 0.5, 0.5], requires_grad=True)
    got = normalize_reward(rewards)
    assert got.tolist() == [0.0, 0.0, 0.0]
    (got * tensor([1.0, 2.0, 3.0])).sum().backward()
    assert rewards.grad.isfinite().all()


def test_float32_rewards_near_one_keep_their_order():
    # mean .99915, deviations -1.5e-4, -.5e-4, .5e-4, 1.5e-4, std sqrt(5e-8 / 3) = 1.291e-4;
    # -1.5e-4 / (1.291e-4 + 1e-5) = -1.078
    got = normalize_reward(tensor([0.9990, 0.9991, 0.9992, 0.9993]))
    assert got.tolist() == pytest.approx([-1.078, -0.359, 0.359, 1.078], abs=3e-3)


def test_float16_rewards_are_normalized_in_float32():
    # nearest float16: 0.99902 three times, then 0.99951, one step of 4.88e-4 above;
    # mean 1/4 step above the three, std 1/2 step: -.25 / (.5 + 1e-5 / 4.88e-4) = -0.480, 1.441
    half = tensor([0.9990, 0.9991, 0.9992, 0.9993], dtype=torch.float16)
    got = normalize_reward(half)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx([-0.480, -0.480, -0.480, 1.441], abs=2e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_large_rewards_do_not_overflow(dtype):
    # squares of 3e4 are beyond float16; (-3e4, 3e4) has std 3e4 * sqrt 2
    got = normalize_reward(tensor([-3e4, 3e4], dtype=dtype))
    assert got.tolist() == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)])


def test_gradient_agrees_with_finite_differences():
    reward = tensor([0.1, 0.9, -0.4], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(normalize_reward, reward)


@pytest.mark.parametrize("value", [0.7, 1 / 3, -123.456, 1e-30])
def test_equal_rewards_become_exactly_zero_although_their_mean_is_rounded(value):
    """The float32 mean of eight 0.7 is 0.70000005, and 6e-8 over a spread of 0 + eps is 0.006."""
    assert torch.equal(normalize_reward(torch.full((8,), value)), torch.zeros(8))
