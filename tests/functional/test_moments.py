"""Masked sums, means and variances, loss aggregation and running moments."""

import math

import pytest
import torch
from torch import tensor

from rlhf_lab import functional as F
from rlhf_lab.functional import RunningMoments
from tests.functional.calls import WAYS

NAN, INF = float("nan"), float("inf")
X = tensor([[1.0, 2.0, NAN], [4.0, INF, -INF]])
MASK = tensor([[True, True, False], [True, False, False]])
ROOT2 = math.sqrt(2)


def test_statistics_match_hand_computed():
    # 1, 2 and 4: mean 7/3, squared deviations (16 + 1 + 25) / 9 = 14/3
    assert F.masked_mean(X, MASK).item() == pytest.approx(7 / 3)
    assert F.masked_mean(X, MASK, dim=-1).tolist() == [1.5, 4.0]
    assert F.masked_mean(tensor([[1.0, 2.0], [3.0, 6.0]])).item() == 3.0
    for denominator in (10, 10.0, tensor(10)):
        assert F.masked_mean(X, MASK, denominator=denominator).item() == pytest.approx(0.7)
    assert F.masked_var(X, MASK).item() == pytest.approx(7 / 3)
    assert F.masked_var(X, MASK, unbiased=False).item() == pytest.approx(14 / 9)
    assert F.masked_var(X, MASK, dim=-1).tolist() == [0.5, 0.0]
    assert F.masked_std(X, MASK).item() == pytest.approx(math.sqrt(7 / 3))
    assert F.sequence_sum(X, MASK).tolist() == [3.0, 4.0]
    assert F.sequence_sum(tensor([[1.5, 2.0]])).tolist() == [3.5]


def test_statistics_of_nothing_and_of_one_number_are_zero():
    one = tensor([3.0], requires_grad=True)
    for spread in (F.masked_var(one), F.masked_std(one), F.masked_var(one, tensor([False]))):
        assert spread.item() == 0.0
    (F.masked_var(one) + F.masked_std(one)).backward()
    assert one.grad.tolist() == [0.0]
    assert F.masked_mean(torch.zeros(0, 3)).item() == 0.0
    assert F.masked_mean(X, MASK, denominator=0).isfinite()
    assert F.zero_masked(X, None) is X


def test_zero_masked_stops_nan_before_exp_and_covers_later_axes():
    x = tensor([[[0.0, 1.0], [1e9, INF]]], requires_grad=True)
    F.zero_masked(x, tensor([[True, False]])).exp().sum().backward()
    assert x.grad.flatten().tolist() == pytest.approx([1.0, math.e, 0.0, 0.0])


def test_variance_keeps_its_digits_far_from_zero():
    # the sum of squares minus the square of the sum would be 0
    assert F.masked_var(tensor([9999.0, 10000.0, 10001.0])).item() == 1.0
    far = 1e8 + 80 * torch.arange(1000.0).sin()  # float32 numbers have a distance of 8
    assert F.masked_var(far).item() == pytest.approx(far.double().var().item(), rel=1e-6)
    assert F.masked_var(torch.stack([far, far]), dim=-1, unbiased=False)[1] == pytest.approx(
        far.double().var(unbiased=False).item(), rel=1e-6
    )
    assert seen([1e9 - 1, 1e9], [1e9 + 1]).var == pytest.approx(1.0, rel=1e-6)


def test_whiten_matches_hand_computed():
    # mean 2, variance 2
    x, mask = tensor([[1.0, 3.0, NAN]]), tensor([[True, True, False]])
    assert F.whiten(x, mask)[0].tolist() == pytest.approx([-1 / ROOT2, 1 / ROOT2, 0.0])
    scaled = F.whiten(x, mask, shift_mean=False)[0].tolist()
    assert scaled == pytest.approx([2 - 1 / ROOT2, 2 + 1 / ROOT2, 0.0])
    # eps inside the root: (0 - 1) / sqrt(2 + 2)
    assert F.whiten(tensor([0.0, 2.0]), eps=2.0).tolist() == [-0.5, 0.5]
    assert F.whiten(torch.zeros(0, 3)).shape == (0, 3)
    assert F.whiten(tensor([[5.0]])).tolist() == [[0.0]]


@pytest.mark.parametrize("offset", [100.0, 1e3, -1e4])
@pytest.mark.parametrize("shift_mean", [True, False])
def test_whiten_ignores_a_common_offset(offset, shift_mean):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)) + offset
    mask = torch.ones_like(x, dtype=torch.bool)
    mask[::2, 5:] = False
    expected = F.whiten(x.double(), mask, shift_mean)
    tolerance = 1e-6 if shift_mean else 1e-6 * abs(offset)
    got = F.whiten(x, mask, shift_mean).double()
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=0)
    pulled = (x - offset).requires_grad_()
    (F.whiten(pulled + offset, mask) ** 3).sum().backward()
    exact = (x - offset).double().requires_grad_()
    (F.whiten(exact + offset, mask) ** 3).sum().backward()
    torch.testing.assert_close(pulled.grad.double(), exact.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("value", [0.1, 12.3, 100.1, 1000.1, 1e5, -1e30])
@pytest.mark.parametrize("shift_mean", [True, False])
def test_whiten_returns_zero_for_equal_entries(value, shift_mean):
    """The mean is rounded, and the rounding error must not be scaled to 1."""
    x, mask = torch.full((3, 7), value), torch.ones(3, 7, dtype=torch.bool)
    mask[1, 2:] = False
    expected = torch.zeros(3, 7) if shift_mean else x * mask
    got = F.whiten(x.masked_fill(~mask, 5.0), mask, shift_mean)
    torch.testing.assert_close(got, expected, atol=0, rtol=2e-7)


def test_aggregate_matches_hand_computed():
    x = tensor([[6.0, 2.0, NAN], [3.0, INF, 0.0], [NAN, NAN, NAN]])
    mask = tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()
    # (6 + 2 + 3) / 3; (4 + 3) / 2, without the empty row; 11 / (3 * 3)
    assert [F.aggregate(x, mask, way).item() for way in WAYS] == pytest.approx(
        [11 / 3, 3.5, 11 / 9]
    )
    assert [F.aggregation_denominator(mask, way).item() for way in WAYS] == [3, 2, 9]
    assert F.aggregation_denominator(mask, "constant", max_len=10).item() == 30
    assert F.aggregate(x, mask, "sequence_mean", denominator=14).item() == 0.5
    assert F.aggregate(tensor([[1.0, 3.0]])).item() == 2.0


def seen(*batches):
    moments = RunningMoments()
    for batch in batches:
        moments = moments.update(tensor(batch, dtype=torch.float64))
    return moments


def test_running_moments_match_hand_computed():
    # 1, 3: mean 2, squares 1 + 1; then 8: mean 4, squares 9 + 1 + 16
    assert seen([1.0, 3.0]) == RunningMoments(2, 2.0, 2.0)
    both = seen([1.0, 3.0], [8.0])
    assert both == RunningMoments(3, 4.0, 26.0)
    assert both.var == 13.0 and both.std == math.sqrt(13.0)
    masked = RunningMoments.of(tensor([[1.0, NAN], [3.0, INF]]), tensor([[1, 0], [1, 0]]).bool())
    assert masked == RunningMoments(2, 2.0, 2.0)
    assert seen() == seen([]) == RunningMoments.of(tensor([NAN]), tensor([False]))
    assert seen([5.0]).merge(seen()) == seen().merge(seen([5.0])) == RunningMoments(1, 5.0, 0.0)
    assert seen([5.0]).std == 0.0


def test_running_moments_are_exact_in_float64():
    assert RunningMoments.of(tensor([1e38, -1e38])).std == pytest.approx(1e38 * ROOT2)
    # 200 * 1000 and 1000^2 exceed float16
    half = RunningMoments.of(torch.full((200,), 1000.0, dtype=torch.float16))
    assert (half.mean, half.m2) == (1000.0, 0.0)


def test_running_moments_raise_on_nan():
    with pytest.raises(ValueError, match="x contains 2 numbers that are nan or inf"):
        seen([1.0, NAN, INF])


def test_scale_rewards_matches_hand_computed():
    # 1, 3: mean 2, std sqrt 2
    moments = seen([1.0, 3.0])
    scaled = F.scale_rewards(tensor([0.0, 4.0]), moments)
    assert scaled.tolist() == pytest.approx([0.0, 4 / ROOT2])
    shifted = F.scale_rewards(tensor([0.0, 4.0]), moments, shift_mean=True)
    assert shifted.tolist() == pytest.approx([-2 / ROOT2, 2 / ROOT2])
    assert F.scale_rewards(tensor([ROOT2]), moments, eps=ROOT2).tolist() == pytest.approx([0.5])
    # without a deviation the scale stays
    assert F.scale_rewards(tensor([2.0]), RunningMoments()).tolist() == [2.0]
    assert F.scale_rewards(tensor([2.0]), seen([5.0]), shift_mean=True).tolist() == [-3.0]
