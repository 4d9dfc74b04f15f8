"""Clipping, penalties and comparisons with a label."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from rlhf_lab.functional import (
    clip_rewards,
    flawed_responses,
    has_stop,
    overlong_penalty,
    penalize_responses,
    response_mask,
    rewards_over_labels,
)

number = st.floats(-100, 100, width=32)
MASK = tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()


def test_clipping_by_hand():
    rewards = tensor([-11.0, -10.0, 0.5, 12.0])
    assert clip_rewards(rewards, 10.0).tolist() == [-10.0, -10.0, 0.5, 10.0]
    assert clip_rewards(tensor([float("inf")]), 2.0).tolist() == [2.0]
    for limit in (0.0, -1.0):
        with pytest.raises(ValueError, match=f"limit must .*got {limit}"):
            clip_rewards(rewards, limit)


def test_rewards_over_labels_by_hand():
    got = rewards_over_labels(tensor([3.0, 1.0]), tensor([1.0, 2.5]))
    assert got.tolist() == [2.0, -1.5]


@given(st.lists(st.tuples(number, number), min_size=1, max_size=5), st.floats(0.5, 20))
@settings(max_examples=40, deadline=None)
def test_clipped_differences_equal_a_loop(pairs, limit):
    rewards, labels = (tensor([p[i] for p in pairs], dtype=torch.float64) for i in (0, 1))
    got = clip_rewards(rewards_over_labels(rewards, labels), limit)
    assert got.tolist() == [min(max(r - label, -limit), limit) for r, label in pairs]


def test_flaws_by_hand():
    finished = tensor([False, True, True, True])
    assert flawed_responses(MASK, finished).tolist() == [True, False, False, False]
    # lengths 4, 2, 1, 0
    assert flawed_responses(MASK, min_response_length=2).tolist() == [False, False, True, True]
    both = flawed_responses(MASK, finished, min_response_length=1)
    assert both.tolist() == [True, False, False, True]
    assert not flawed_responses(MASK).any()
    with pytest.raises(ValueError, match="min_response_length must .*got -1"):
        flawed_responses(MASK, min_response_length=-1)


def test_a_length_is_a_number_of_tokens_and_a_stop_in_the_last_slot_is_a_stop():
    # torchtune counts the index of the last token (one too few), and finds this stop missing
    tokens = tensor([[5, 6, 9]])
    mask = response_mask(tokens, [9])
    assert flawed_responses(mask, has_stop(tokens, [9], mask), 3).tolist() == [False]
    assert flawed_responses(mask, has_stop(tokens, [9], mask), 4).tolist() == [True]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=5),
    st.integers(0, 6),
)
@settings(max_examples=40, deadline=None)
def test_flaws_equal_a_loop(rows, least):
    mask = tensor([[t < length for t in range(5)] for length, _ in rows])
    finished = tensor([done for _, done in rows])
    expected = [length < least or not done for length, done in rows]
    assert flawed_responses(mask, finished, least).tolist() == expected


def test_penalties_by_hand():
    rewards, flawed = tensor([5.0, float("nan"), -4.0]), tensor([False, True, True])
    assert penalize_responses(rewards, flawed, -3.0).tolist() == [5.0, -3.0, -3.0]
    less = penalize_responses(tensor([5.0, 1.0]), tensor([False, True]), -3.0, replace=False)
    assert less.tolist() == [5.0, -2.0]
    for penalty in (0.0, 3.0):
        with pytest.raises(ValueError, match=f"reward_penalty must .*got {penalty}"):
            penalize_responses(rewards, flawed, penalty)


@given(
    st.lists(st.tuples(number, st.booleans()), min_size=1, max_size=5),
    st.floats(-10, -0.5, width=32),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_penalties_equal_a_loop(rows, penalty, replace):
    rewards = tensor([r for r, _ in rows], dtype=torch.float64)
    got = penalize_responses(rewards, tensor([bad for _, bad in rows]), penalty, replace)
    expected = [(penalty if replace else r + penalty) if bad else r for r, bad in rows]
    assert got.tolist() == pytest.approx(expected)


def test_overlong_penalty_by_hand():
    # lengths 4, 2, 1, 0 of at most 4, the last 2 of them in the buffer: -2/2, 0, 0, 0
    assert overlong_penalty(MASK, max_len=4, buffer=2).tolist() == [-1.0, 0.0, 0.0, 0.0]
    # of at most 4, all in the buffer: -4/4, -2/4, -1/4, 0; of at most 3: beyond it still -1
    assert overlong_penalty(MASK, 4, 4).tolist() == [-1.0, -0.5, -0.25, 0.0]
    assert overlong_penalty(MASK, 3, 2).tolist() == [-1.0, -0.5, 0.0, 0.0]
    for buffer in (0, 5):
        with pytest.raises(ValueError, match=f"buffer must .*max_len=4, got {buffer}"):
            overlong_penalty(MASK, 4, buffer)


@given(st.integers(0, 8), st.integers(1, 8), st.data())
@settings(max_examples=60, deadline=None)
def test_overlong_penalty_equals_the_three_cases_of_its_definition(length, max_len, data):
    buffer = data.draw(st.integers(1, max_len))
    if length <= max_len - buffer:
        expected = 0.0
    elif length <= max_len:
        expected = ((max_len - buffer) - length) / buffer
    else:
        expected = -1.0
    mask = torch.arange(8)[None] < length
    assert overlong_penalty(mask, max_len, buffer).item() == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_comes_back_in_float32(dtype):
    big, one = tensor([2048.0], dtype=dtype), tensor([0.5], dtype=dtype)
    # 2048 - 0.5 is 2048 in half precision
    assert rewards_over_labels(big, one).tolist() == [2047.5]
    assert clip_rewards(big, 2047.5).tolist() == [2047.5]
    assert penalize_responses(big, tensor([True]), -0.5, replace=False).tolist() == [2047.5]


def test_rewards_at_the_end_of_float32_stay_finite():
    big = tensor([3e38, -3e38])
    assert clip_rewards(big, 10.0).tolist() == [10.0, -10.0]
    assert penalize_responses(big, tensor([True, True]), -3.0).tolist() == [-3.0, -3.0]


def test_gradients_agree_with_finite_differences():
    torch.manual_seed(0)
    rewards, labels = torch.randn(2, 4, dtype=torch.float64).requires_grad_()
    flawed = tensor([True, False, True, False])
    check = torch.autograd.gradcheck
    assert check(lambda r: clip_rewards(r, 0.5), rewards)
    assert check(rewards_over_labels, (rewards, labels))
    for replace in (True, False):
        assert check(lambda r, x=replace: penalize_responses(r, flawed, -1.0, x), rewards)
    nan = tensor([float("nan"), 1.0], requires_grad=True)
    penalize_responses(nan, tensor([True, False]), -1.0).sum().backward()
    assert nan.grad.tolist() == [0.0, 1.0]
