"""Clip fractions, importance weights, effective samples, promoted mass and gradient noise."""

import math

import pytest
import torch
from torch import tensor

from rlhf_lab import functional as F

NAN = float("nan")
LOGPROBS = tensor([[0.5, 1.0, 1.5, NAN], [0.75, 2.0, NAN, NAN]]).log()
MASK = tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool()
ZEROS = torch.zeros(2, 4)


def test_clip_fractions_match_hand_computed():
    # ratios 0.5, 1, 1.5, 0.75 and 2
    assert F.clip_fraction(LOGPROBS, ZEROS, 0.2, MASK).item() == pytest.approx(4 / 5)
    assert F.clip_fraction_low(LOGPROBS, ZEROS, 0.2, MASK).item() == pytest.approx(2 / 5)
    assert F.clip_fraction_high(LOGPROBS, ZEROS, 0.75, MASK).item() == pytest.approx(1 / 5)
    # negative at 0.5 and 2, positive at 0.75 and 1.5
    advantages = tensor([[-1.0, -1.0, 1.0, NAN], [1.0, -1.0, 0.0, 0.0]])
    for x, expected in ((advantages, 1 / 5), (ZEROS, 0.0)):
        assert F.clip_fraction_low(LOGPROBS, ZEROS, 0.2, MASK, x).item() == pytest.approx(expected)
        assert F.clip_fraction_high(LOGPROBS, ZEROS, 0.2, MASK, x).item() == pytest.approx(expected)


def test_value_clip_fraction_matches_hand_computed():
    # clipped at 0.2: error 0.8 instead of 0 (stopped), 0.2 instead of 1 (not), within the clip
    values, returns = tensor([[1.0, 1.0, 0.1, NAN]]), tensor([[1.0, 0.0, 0.0, NAN]])
    got = F.value_clip_fraction(values, returns, ZEROS[:1], 0.2, MASK[:1])
    assert got.item() == pytest.approx(1 / 3)


def test_statistics_of_ratios_match_hand_computed():
    assert F.mean_ratio(LOGPROBS, ZEROS, MASK).item() == pytest.approx(5.75 / 5)
    # .25 + 0 + .25 + .0625 + 1
    assert F.chi_square(LOGPROBS, ZEROS, MASK).item() == pytest.approx(1.5625 / 5)
    # .25 + 1 + 2.25 + .5625 + 4
    got = F.effective_sample_size(LOGPROBS, ZEROS, MASK)
    assert got.item() == pytest.approx(5.75**2 / 8.0625)
    assert [f(ZEROS, ZEROS).item() for f in (F.mean_ratio, F.chi_square)] == [1.0, 0.0]
    assert F.effective_sample_size(ZEROS - 700, ZEROS).item() == pytest.approx(8.0)
    assert F.effective_sample_size(tensor([[200.0, 0.0]]), ZEROS[:1, :2]).item() == pytest.approx(1)
    far = tensor([[1000.0, -1000.0]])
    assert all(f(far, ZEROS[:1, :2]).isfinite() for f in (F.mean_ratio, F.chi_square))


def test_importance_weights_match_hand_computed():
    logprobs, mask = tensor([[0.5, 8.0, 1.0]]).log(), tensor([[True, True, False]])
    for function, expected in (
        (F.truncated_importance_weights, [0.5, 2.0, 0.0]),
        (F.masked_importance_weights, [0.5, 0.0, 0.0]),
    ):
        assert function(logprobs, ZEROS[:1, :3], 2.0, mask)[0].tolist() == pytest.approx(expected)
        for cap in (0.0, -1.0, math.nan):
            with pytest.raises(ValueError, match=f"cap must be greater than 0, got {cap}"):
                function(logprobs, ZEROS[:1, :3], cap, mask)


def test_promoted_mass_matches_hand_computed():
    now, before = (
        tensor(x).log()[None] for x in ([[0.5, 0.5], [0.9, 0.1]], [[0.25, 0.75], [0.5, 0.5]])
    )
    torch.testing.assert_close(F.promoted_mass(now, before), tensor([0.325, -0.325]))
    one = F.promoted_mass(now, before, tensor([[True, False]]))
    torch.testing.assert_close(one, tensor([0.25, -0.25]))


def test_gradient_cosine_matches_hand_computed():
    # batches of 2: means (1, 0), (1, 1), (0, -2); the seventh row fills no batch
    rows = tensor([[2.0, 0], [0, 0], [1, 3], [1, -1], [3, -2], [-3, -2], [9, 9]])
    cosine = F.gradient_cosine(rows.requires_grad_(), tensor([1.0, 0.0]), 2)
    torch.testing.assert_close(cosine, tensor([1.0, math.sqrt(0.5), 0.0]))
    cosine.sum().backward()
    assert not rows.grad[6].any() and rows.grad[2, 1] != 0
    for n in (0, 8):
        with pytest.raises(ValueError, match=f"n must be between 1 and 7 .*got {n}"):
            F.gradient_cosine(rows, rows[0], n)


def test_kept_share_matches_hand_computed():
    # (3, 1) along (2, 0): 6 of 4; (1, 9): 2 of 4
    shares = F.kept_share(tensor([[3.0, 1.0], [1.0, 9.0], [0.0, 5.0]]), tensor([2.0, 0.0]))
    assert shares.tolist() == [1.5, 0.5, 0.0]
