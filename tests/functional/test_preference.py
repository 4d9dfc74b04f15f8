"""Preferences: raters, Bradley-Terry losses, accuracy, AUC and calibration."""

import math

import pytest
import torch
from torch import tensor

from rlhf_lab import functional as F

NAN = float("nan")
LOG3 = math.log(3)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_rater_matches_hand_computed():
    prefers = lambda gap, uniforms, **settings: F.sample_preferences(
        tensor([gap] * 2), tensor(uniforms), **settings
    ).tolist()
    # sigmoid(log 3) = 3/4; at temperature 2 sqrt(3) / (1 + sqrt(3)) = .634
    assert prefers(LOG3, [0.74, 0.76]) == [True, False]
    assert prefers(LOG3, [0.63, 0.64], temperature=2.0) == [True, False]
    # a fifth of the labels is flipped: 4/5 * 3/4 + 1/5 * 1/4 = 13/20
    assert prefers(LOG3, [0.64, 0.66], flip_rate=0.2) == [True, False]
    for flip_rate in (0.0, 0.3, 1.0):
        assert prefers(0.0, [0.49, 0.51], flip_rate=flip_rate) == [True, False]
    assert F.sample_preferences(torch.zeros(0), torch.zeros(0)).tolist() == []
    extreme = tensor([3e38, -3e38])
    assert F.sample_preferences(extreme, tensor([0.999, 0.0])).tolist() == [True, False]
    flipped = F.sample_preferences(extreme, tensor([0.81, 0.19]), flip_rate=0.2)
    assert flipped.tolist() == [False, True]


def test_rater_raises_on_settings_without_meaning():
    for name, x in (("temperature", 0.0), ("flip_rate", 1.1), ("uniforms", torch.tensor([5.0]))):
        with pytest.raises(ValueError, match=f"{name}.* must"):
            F.sample_preferences(torch.zeros(1), **{"uniforms": torch.zeros(1)} | {name: x})


def test_bradley_terry_matches_hand_computed():
    # difference log 3: sigmoid = 3/4; difference 0: 1/2
    loss = F.bradley_terry_loss(tensor([LOG3, 2.0]), tensor([0.0, 2.0]))
    assert loss.item() == pytest.approx((math.log(4 / 3) + math.log(2)) / 2)
    # a margin of log 3 makes a tie
    assert F.bradley_terry_loss(tensor([LOG3]), tensor([0.0]), LOG3).item() == pytest.approx(
        math.log(2)
    )
    each = F.bradley_terry_loss(tensor([LOG3, 0.0]), torch.zeros(2), tensor([LOG3, 0]))
    assert each.item() == pytest.approx(math.log(2))
    # centering: 0.1 * (2 + 2)^2, with slope -1/2 of the tie and 2 * 0.1 * 4
    tie = tensor([2.0], requires_grad=True)
    loss = F.bradley_terry_loss(tie, tensor([2.0]), center_coef=0.1)
    assert loss.item() == pytest.approx(math.log(2) + 1.6)
    loss.backward()
    assert tie.grad.item() == pytest.approx(0.3)
    with pytest.raises(ValueError, match=r"center_coef must .*got -0\.1"):
        F.bradley_terry_loss(tie, tie, center_coef=-0.1)


def test_bradley_terry_at_float32_extremes_is_finite():
    # -log sigmoid(-1e4) is 1e4, with slope -1
    chosen = tensor([-1e4, 1e4], requires_grad=True)
    loss = F.bradley_terry_loss(chosen, torch.zeros(2))
    loss.backward()
    assert loss.item() == 5000.0 and chosen.grad.tolist() == [-0.5, 0.0]


def test_divergence_mask_matches_hand_computed():
    chosen = tensor([[1, 2, 3, 4], [1, 2, 0, 0], [1, 2, 0, 0], [1, 2, 9, 4]])
    rejected = tensor([[1, 5, 3, 0], [1, 2, 0, 0], [1, 2, 0, 0], [1, 2, 9, 5]])
    chosen_mask = tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    rejected_mask = tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    mask = F.divergence_mask(chosen, rejected, chosen_mask, rejected_mask)
    # the second pair is equal; in the third one response continues with a token equal to padding
    assert mask.int().tolist() == [[0, 1, 1, 1], [0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_token_loss_matches_hand_computed():
    # pair 0: differences log 3 and 0; pair 1 has no position; pair 2: log 2
    chosen = tensor([[NAN, LOG3, 1.0], [NAN] * 3, [5.0, NAN, NAN]], requires_grad=True)
    rejected = tensor([[NAN, 0.0, 1.0], [NAN] * 3, [5.0, NAN, NAN]])
    mask = tensor([[0, 1, 1], [0, 0, 0], [1, 0, 0]]).bool()
    loss = F.bradley_terry_token_loss(chosen, rejected, mask)
    assert loss.item() == pytest.approx(((math.log(4 / 3) + math.log(2)) / 2 + math.log(2)) / 2)
    loss.backward()
    # -sigmoid(-difference) / positions / pairs
    assert chosen.grad[mask].tolist() == pytest.approx([-1 / 16, -1 / 8, -1 / 4])


def test_accuracy_and_auc_match_hand_computed():
    # won, lost, tied, won
    assert F.preference_accuracy(tensor([0.1, -2.0, 0.0, 3.0]), torch.zeros(4)).item() == 0.625
    scores, labels = tensor([3.0, 1.0, 2.0, 1.0]), tensor([True, True, False, False])
    # 3 beats both; 1 loses to 2 and ties with 1
    assert F.auc(scores, labels).item() == pytest.approx((1 + 1 + 0 + 0.5) / 4)
    both = F.auc(torch.stack([scores, -scores]), labels)
    assert both.tolist() == pytest.approx([0.625, 0.375]) and both.dtype == torch.float64
    assert F.auc(scores, torch.ones(4).bool()).isnan()
    infinite = tensor([[math.inf, 0.0, math.inf, -math.inf], [3.0, NAN, 2.0, 1.0]])  # one tie
    assert F.auc(infinite, labels).nan_to_num(-1).tolist() == [0.625, -1]
    assert F.preference_accuracy(infinite[1], scores).isnan()


def test_calibration_matches_hand_computed():
    # probabilities 1/4, 1/2, 3/4, 9/10: two bins of two
    gaps = tensor([math.log(9), 0.0, LOG3, -LOG3])
    bins = F.calibration_bins(gaps, tensor([True, True, False, False]), 2)
    assert bins.predicted.tolist() == pytest.approx([0.375, 0.825])
    assert bins.observed.tolist() == [0.5, 0.5] and bins.count.tolist() == [2, 2]
    # three bins of four pairs: the first has one more
    assert F.calibration_bins(gaps, tensor([True] * 4), 3).count.tolist() == [2, 1, 1]
    extreme = F.calibration_bins(tensor([3e38, -3e38]), tensor([True, False]), 2)
    assert extreme.predicted.tolist() == extreme.observed.tolist() == [0.0, 1.0]
    for n_bins in (0, 5):
        with pytest.raises(ValueError, match=f"n_bins must be between 1 and 4 .*got {n_bins}"):
            F.calibration_bins(gaps, tensor([True] * 4), n_bins)
