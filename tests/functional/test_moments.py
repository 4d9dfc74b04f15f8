"""Running moments: merged as if seen at once, saved as plain numbers."""

import dataclasses
import inspect
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from rlhf_lab.functional import (
    RunningMoments,
    normalize_reward,
    scale_rewards,
)

NAN, INF = float("nan"), float("inf")
number = st.floats(-1e3, 1e3, width=32)
streams = st.lists(st.lists(number, max_size=5), min_size=1, max_size=4)


def seen(*batches):
    moments = RunningMoments()
    for batch in batches:
        moments = moments.update(tensor(batch, dtype=torch.float64))
    return moments


def test_moments_by_hand():
    # 1, 3: mean 2, squares 1 + 1; then 8: mean 4, squares 9 + 1 + 16
    assert seen([1.0, 3.0]) == RunningMoments(2, 2.0, 2.0)
    both = seen([1.0, 3.0], [8.0])
    assert both == RunningMoments(3, 4.0, 26.0)
    assert both.var == 13.0 and both.std == math.sqrt(13.0)
    masked = RunningMoments.of(tensor([[1.0, NAN], [3.0, INF]]), tensor([[1, 0], [1, 0]]).bool())
    assert masked == RunningMoments(2, 2.0, 2.0)


@given(streams)
@settings(max_examples=50, deadline=None)
def test_batch_by_batch_merged_and_all_at_once_agree_with_numpy(batches):
    one_by_one = seen(*batches)
    merged = RunningMoments()
    for batch in reversed(batches):
        merged = seen(batch).merge(merged)
    everything = np.array(sum(batches, []), dtype=np.float64)
    for moments in (one_by_one, merged):
        assert moments.count == everything.size
        if everything.size:
            assert moments.mean == pytest.approx(everything.mean(), rel=1e-9, abs=1e-9)
        if everything.size > 1:
            assert moments.var == pytest.approx(everything.var(ddof=1), rel=1e-9, abs=1e-6)


def test_small_spread_far_from_zero_keeps_its_digits():
    # the sum of squares less the square of the sum would be 0 here, even in double precision
    far = seen([1e9 - 1, 1e9], [1e9 + 1])
    assert far.var == pytest.approx(1.0, rel=1e-6)


def test_nothing_and_one_number_have_no_spread():
    assert seen() == seen([]) == RunningMoments()
    assert seen([5.0]) == RunningMoments(1, 5.0, 0.0) and seen([5.0]).std == 0.0
    assert seen([5.0]).merge(RunningMoments()) == seen([5.0])
    assert RunningMoments().merge(seen([5.0])) == seen([5.0])
    assert RunningMoments.of(tensor([NAN]), tensor([False])) == RunningMoments()


def test_moments_survive_json_to_the_bit():
    moments = seen([0.1, 0.2], [0.7])
    assert RunningMoments(**json.loads(json.dumps(dataclasses.asdict(moments)))) == moments
    with pytest.raises(dataclasses.FrozenInstanceError):
        moments.mean = 0.0


def test_what_would_spoil_the_stream_for_ever_is_refused():
    with pytest.raises(ValueError, match="x contains 2 numbers that are nan or inf"):
        seen([1.0, NAN, INF])
    with pytest.raises(ValueError, match="mask has shape"):
        inspect.unwrap(RunningMoments.of.__func__)(
            RunningMoments, torch.zeros(2), torch.ones(3).bool()
        )
    for wrong in ((-1, 0.0, 0.0), (1, NAN, 0.0), (1, 0.0, -1.0), (1, 0.0, INF)):
        with pytest.raises(ValueError, match="count, mean and m2 must"):
            RunningMoments(*wrong)


def test_scaling_by_hand():
    # 1, 3: mean 2, std sqrt 2
    moments, root = seen([1.0, 3.0]), math.sqrt(2)
    scaled = scale_rewards(tensor([0.0, 4.0]), moments)
    assert scaled.tolist() == pytest.approx([0.0, 4 / root])
    normed = scale_rewards(tensor([0.0, 4.0]), moments, shift_mean=True)
    assert normed.tolist() == pytest.approx([-2 / root, 2 / root])
    assert scale_rewards(tensor([root]), moments, eps=root).tolist() == pytest.approx([0.5])


def test_scaling_before_there_is_a_spread_leaves_the_scale_alone():
    assert scale_rewards(tensor([2.0]), RunningMoments()).tolist() == [2.0]
    assert scale_rewards(tensor([2.0]), seen([5.0]), shift_mean=True).tolist() == [-3.0]
    assert scale_rewards(tensor([5.0, 5.0]), seen([5.0, 5.0]), True).tolist() == [0.0, 0.0]


@given(st.lists(number, min_size=2, max_size=6).filter(lambda x: np.std(x) > 1e-3))
@settings(max_examples=40, deadline=None)
def test_scaling_by_a_batchs_own_moments_is_normalize_reward(rewards):
    rewards = tensor(rewards, dtype=torch.float64)
    got = scale_rewards(rewards, RunningMoments.of(rewards), shift_mean=True, eps=1e-5)
    torch.testing.assert_close(got, normalize_reward(rewards, eps=1e-5))


@given(st.integers(0, 10_000), st.lists(st.integers(0, 6), max_size=3))
@settings(max_examples=50, deadline=None)
def test_moments_of_real_entries_are_the_same_however_the_batch_is_cut(seed, cuts):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 3, generator=generator, dtype=torch.float64) + 5
    mask = torch.rand(6, 3, generator=generator) < 0.6
    edges = [0, *sorted(cuts), 6]
    parts = [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]
    moments = RunningMoments()
    for part in parts:
        moments = moments.merge(RunningMoments.of(x[part], mask[part]))
    real = x[mask].numpy()
    assert moments.count == real.size
    if real.size:
        var = real.var(ddof=1) if real.size > 1 else 0.0
        assert moments.mean == pytest.approx(real.mean())
        assert moments.var == pytest.approx(var)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_more(dtype):
    # 200 * 1000 and 1000^2 are beyond float16
    x = torch.full((200,), 1000.0, dtype=dtype)
    x[0] = 0.0
    moments = RunningMoments.of(x)
    assert moments.mean == pytest.approx(995.0) and moments.m2 == pytest.approx(995_000.0)
    assert scale_rewards(x, moments).dtype == torch.float32


def test_extremes_of_float32_are_taken_in_double_precision():
    moments = RunningMoments.of(tensor([1e38, -1e38]))
    assert moments.mean == 0.0 and moments.std == pytest.approx(1e38 * math.sqrt(2))
    assert scale_rewards(tensor([1e38]), moments).item() == pytest.approx(1 / math.sqrt(2))


def test_gradients_agree_with_finite_differences():
    torch.manual_seed(0)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    moments = RunningMoments.of(x)
    assert torch.autograd.gradcheck(lambda v: scale_rewards(v[0], moments, True), x)
