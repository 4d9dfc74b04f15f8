"""A rater who chooses between two texts, and the calibration of a judge."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from rlhf_lab.functional import calibration_bins, sample_preferences

gaps = st.lists(st.floats(-8, 8), min_size=1, max_size=12)


def test_a_rater_by_hand():
    # sigmoid(log 3) = 3/4: the first one wins below it
    uniforms = tensor([0.74, 0.76])
    assert sample_preferences(tensor([math.log(3)] * 2), uniforms).tolist() == [True, False]
    # at temperature 2 the gap is log 3 / 2, and sqrt(3) / (1 + sqrt(3)) = .634
    half = sample_preferences(tensor([math.log(3)] * 2), tensor([0.63, 0.64]), temperature=2.0)
    assert half.tolist() == [True, False]
    # a fifth of the labels is turned round: 4/5 of 3/4 and 1/5 of 1/4 are 13/20
    noted = sample_preferences(tensor([math.log(3)] * 2), tensor([0.64, 0.66]), flip_rate=0.2)
    assert noted.tolist() == [True, False]
    # a tie is a fair coin, with and without noise
    tie = torch.zeros(2)
    for flip_rate in (0.0, 0.3, 1.0):
        found = sample_preferences(tie, tensor([0.49, 0.51]), flip_rate=flip_rate)
        assert found.tolist() == [True, False]


@given(gaps, st.floats(0.25, 4), st.floats(0, 1), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_turning_a_pair_round_turns_the_winner_round(found, temperature, flip_rate, seed):
    gap = tensor(found, dtype=torch.float64)
    uniforms = torch.rand(len(gap), generator=torch.Generator().manual_seed(seed)).double()
    first = sample_preferences(gap, uniforms, temperature, flip_rate)
    other = sample_preferences(-gap, 1 - uniforms, temperature, flip_rate)
    assert torch.equal(first, ~other)
    # all labels turned round is a rater with the opposite taste
    turned = sample_preferences(gap, uniforms, temperature, 1.0)
    assert torch.equal(turned, sample_preferences(-gap, uniforms, temperature))


def test_flips_are_drawn_apart_from_the_choice():
    """The share of wins is that of two independent throws, one for the taste and one for noise."""
    generator = torch.Generator().manual_seed(0)
    n, gap, flip_rate = 40_000, 1.5, 0.2
    wins = sample_preferences(
        torch.full((n,), gap), torch.rand(n, generator=generator), flip_rate=flip_rate
    )
    likes = torch.rand(n, generator=generator) < 1 / (1 + math.exp(-gap))
    noise = torch.rand(n, generator=generator) < flip_rate
    in_two_steps = (likes ^ noise).float().mean()
    assert wins.float().mean().item() == pytest.approx(in_two_steps.item(), abs=0.01)


def test_the_extremes_of_a_rater():
    sure = tensor([3e38, -3e38])
    assert sample_preferences(sure, tensor([0.999, 0.0])).tolist() == [True, False]
    assert sample_preferences(sure.double(), tensor([0.81, 0.19]).double(), flip_rate=0.2).tolist()
    noted = sample_preferences(sure, tensor([0.81, 0.19]), flip_rate=0.2)
    assert noted.tolist() == [False, True]
    halves = sample_preferences(tensor([1.0]).half(), tensor([0.7]).half())
    assert halves.tolist() == [True] and halves.dtype == torch.bool
    assert sample_preferences(torch.zeros(0), torch.zeros(0)).tolist() == []
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="temperature must"):
            sample_preferences(sure, sure, temperature)
    for flip_rate in (-0.1, 1.1):
        with pytest.raises(ValueError, match="flip_rate must"):
            sample_preferences(sure, sure, flip_rate=flip_rate)


def test_calibration_by_hand():
    # probabilities 1/4, 1/2, 3/4, 9/10: two bins of two
    gaps = tensor([math.log(9), 0.0, math.log(3), -math.log(3)])
    found = calibration_bins(gaps, tensor([True, True, False, False]), 2)
    assert found.predicted.tolist() == pytest.approx([0.375, 0.825])
    assert found.observed.tolist() == [0.5, 0.5]
    assert found.count.tolist() == [2, 2]
    # three bins of four pairs: the first has one more
    assert calibration_bins(gaps, tensor([True] * 4), 3).count.tolist() == [2, 1, 1]


@given(gaps, st.data())
@settings(max_examples=40, deadline=None)
def test_bins_equal_a_loop_and_keep_the_totals(found, data):
    won = [data.draw(st.booleans()) for _ in found]
    n_bins = data.draw(st.integers(1, len(found)))
    got = calibration_bins(tensor(found, dtype=torch.float64), tensor(won), n_bins)
    pairs = sorted(zip(found, range(len(found)), won, strict=True))
    start = 0
    for b in range(n_bins):
        size = len(pairs) // n_bins + (b < len(pairs) % n_bins)
        rows = pairs[start : start + size]
        start += size
        chances = [1 / (1 + math.exp(-gap)) for gap, _, _ in rows]
        assert got.count[b] == size
        assert got.predicted[b].item() == pytest.approx(sum(chances) / size, rel=1e-9)
        assert got.observed[b].item() == pytest.approx(sum(won for *_, won in rows) / size)
    assert (got.observed * got.count).sum().item() == pytest.approx(sum(won))
    assert (got.predicted.diff() >= -1e-12).all()


def test_a_rater_is_calibrated_to_itself():
    generator = torch.Generator().manual_seed(0)
    gap = 2 * torch.randn(20_000, generator=generator)
    won = sample_preferences(gap, torch.rand(20_000, generator=generator))
    found = calibration_bins(gap, won, 10)
    torch.testing.assert_close(found.observed, found.predicted, atol=0.03, rtol=0)
    # noise draws what happens towards a half, at both ends
    noisy = sample_preferences(gap, torch.rand(20_000, generator=generator), flip_rate=0.2)
    found = calibration_bins(gap, noisy, 10)
    assert found.observed[0] > found.predicted[0] + 0.1
    assert found.observed[-1] < found.predicted[-1] - 0.1


def test_the_extremes_of_calibration():
    one = calibration_bins(tensor([0.0]), tensor([True]), 1)
    assert [x.tolist() for x in one] == [[0.5], [1.0], [1]]
    sure = calibration_bins(tensor([3e38, -3e38]).half().float(), tensor([True, False]), 2)
    assert sure.predicted.tolist() == [0.0, 1.0] and sure.observed.tolist() == [0.0, 1.0]
    half = calibration_bins(tensor([1.0, 2.0], requires_grad=True).half(), tensor([True] * 2), 1)
    assert half.predicted.dtype == torch.float64 and not half.predicted.requires_grad
    for n_bins in (0, 3):
        with pytest.raises(ValueError, match=f"n_bins must be between 1 and 2 .*got {n_bins}"):
            calibration_bins(torch.zeros(2), tensor([True, False]), n_bins)
