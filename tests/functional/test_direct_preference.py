"""Losses of a policy on good, bad and preferred texts: SFT, DPO, IPO, KTO and ORPO."""

import math

import pytest
import torch
from torch import tensor

from rlhf_lab import functional as F

NAN = float("nan")
LOG3 = math.log(3)


def test_sft_loss_matches_hand_computed():
    # (log 2 + log 4) / 2
    logprobs = tensor([[0.5, 0.25, NAN]]).log()
    loss = F.sft_loss(logprobs, tensor([[True, True, False]]))
    assert loss.item() == pytest.approx(1.5 * math.log(2))
    assert F.sft_loss(tensor([[-2.0]])).item() == 2.0


def test_dpo_matches_hand_computed():
    # h = (-1 + 3) - (-2 + 2) = 2; beta h = log 3: -log 3/4
    args, beta = (tensor([-1.0]), tensor([-3.0]), tensor([-2.0]), tensor([-2.0])), LOG3 / 2
    assert F.dpo_loss(*args, beta).item() == pytest.approx(math.log(4 / 3))
    # a tenth of the labels is wrong
    smooth = F.dpo_loss(*args, beta, label_smoothing=0.1).item()
    assert smooth == pytest.approx(0.9 * math.log(4 / 3) + 0.1 * math.log(4))
    # (2 - 1 / (2 * 0.5))^2
    assert F.dpo_loss(*args, 0.5, kind="ipo").item() == pytest.approx(1.0)
    # at the reference log 2
    assert F.dpo_loss(*args[:2], *args[:2], beta).item() == pytest.approx(math.log(2))
    rewards = F.implicit_rewards(tensor([-1.0, -4.0]), tensor([-3.0, -2.0]), 0.5)
    assert rewards.tolist() == [1.0, -1.0]


def test_kto_matches_hand_computed():
    # r = (2, -1); beta (r - z) = log 3 and -2 log 3 with z = 1 and beta = log 3
    policy, ref = tensor([-1.0, -4.0]), tensor([-3.0, -3.0])
    loss = F.kto_loss(policy, ref, tensor([True, True]), 1.0, LOG3)
    assert loss.item() == pytest.approx((1 / 4 + 9 / 10) / 2)
    # a bad text loses what a good one gains
    loss = F.kto_loss(policy, ref, tensor([False, True]), tensor(1.0), LOG3, 2.0, 0.5)
    assert loss.item() == pytest.approx((0.5 * 3 / 4 + 2 * 9 / 10) / 2)
    # (2 - 1 + 5) / 3, and (1 - 4) / 2, which is not a KL
    policy, ref = tensor([-1.0, -4.0, 0.0], requires_grad=True), tensor([-3.0, -3.0, -5.0])
    point = F.kto_reference_point(policy, ref)
    assert point.item() == pytest.approx(2.0) and not point.requires_grad
    assert F.kto_reference_point(tensor([1.0, -4.0]), torch.zeros(2)).item() == 0.0


def test_log_odds_match_hand_computed():
    p = tensor([0.5, 0.75, 0.25, 1e-6], dtype=torch.float64)
    expected = [0.0, LOG3, -LOG3, math.log(1e-6 / (1 - 1e-6))]
    assert F.log_odds(p.log()).tolist() == pytest.approx(expected, abs=1e-12)
    small = tensor([-1e-4])  # 1 - exp(-1e-4) would keep 3 digits in float32
    assert F.log_odds(small).item() == pytest.approx(F.log_odds(small.double()).item(), rel=1e-6)
    # certainty: the odds of 1 - 2^-23, 23 log 2
    assert F.log_odds(torch.zeros(1)).item() == pytest.approx(23 * math.log(2), rel=1e-6)


def test_orpo_matches_hand_computed():
    # P(c) = 1/2, P(r) = 1/4: odds 1 and 1/3, ratio 3: log 2 + lambda * log 4/3
    chosen, rejected = tensor([0.5]).log(), tensor([0.25]).log()
    loss = F.orpo_loss(chosen, rejected, 0.3).item()
    assert loss == pytest.approx(math.log(2) + 0.3 * math.log(4 / 3))
    # the gradient of equations 8 to 10: delta = 1 / (1 + odds ratio)
    both = tensor([0.6, 0.2], dtype=torch.float64).log().requires_grad_()
    F.orpo_loss(both[:1], both[1:], 1.0).backward()
    delta = 1 / (1 + (0.6 / 0.4) / (0.2 / 0.8))
    assert both.grad.tolist() == pytest.approx([-1 - delta / 0.4, delta / 0.8])


def test_losses_at_float32_extremes_have_finite_gradients():
    zero = torch.zeros(1)
    policy = tensor([-1e4], requires_grad=True)
    loss = F.dpo_loss(policy, zero, zero, zero, 1.0)
    loss.backward()
    assert loss.item() == 1e4 and policy.grad.tolist() == [-1.0]
    policy = tensor([-1e4, 1e4], requires_grad=True)
    loss = F.kto_loss(policy, torch.zeros(2), tensor([True, False]), 1e3, 1.0)
    loss.backward()
    assert loss.item() == 1.0 and policy.grad.tolist() == [0.0, 0.0]
    for values in ([0.0, 0.0], [-0.0, -1e4], [-1e4, 0.0], [-1e-45, -1e-45], [-1e4, -1e4]):
        both = tensor(values, requires_grad=True)
        loss = F.orpo_loss(both[:1], both[1:], 1.0)
        loss.backward()
        assert loss.isfinite() and both.grad.isfinite().all(), values


X, GOOD = torch.zeros(1), tensor([True])


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: F.implicit_rewards(X, X, 0.0), r"beta must .*got 0\.0"),
        (lambda: F.dpo_loss(X, X, X, X, -0.1), r"beta must .*got -0\.1"),
        (lambda: F.dpo_loss(X, X, X, X, 0.1, -0.1), "label_smoothing is -0.1"),
        (lambda: F.dpo_loss(X, X, X, X, 0.1, 0.5), "label_smoothing is 0.5"),
        (lambda: F.dpo_loss(X, X, X, X, 0.1, 0.1, "ipo"), "label_smoothing is 0.1 with kind 'ipo'"),
        (lambda: F.kto_loss(X, X, GOOD, 0.0, math.nan), "beta must .*got nan"),
        (lambda: F.kto_loss(X, X, GOOD, 0.0, 0.1, -1.0), "good_weight=-1.0 and .*at least 0"),
        (lambda: F.clip_rewards(X, -1.0), "limit must be at least 0, got -1.0"),
        (lambda: F.clip_rewards(X, math.nan), "limit must be at least 0, got nan"),
        (lambda: F.normalize_reward(X[None]), r"reward must be \[batch\], got \(1, 1\)"),
        (lambda: F.pass_at_k(X, 2.5), "k must .*got 2.5. Pass an integer"),
        (lambda: F.best_of_n_kl_bound(1.5), "n must .*got 1.5. Pass an integer"),
        (lambda: F.best_of_n_kl_bound(0), "n must be at least 1, got 0"),
        (lambda: F.token_rewards(X, GOOD[None], X[None]), "kl_coef is missing"),
        (lambda: F.dpo_loss(X[:0], X[:0], X[:0], X[:0], 0.1), "at least one pair, got none"),
        (lambda: F.kto_loss(X[:0], X[:0], GOOD[:0], 0.0, 0.1), "at least one response, got none"),
        (lambda: F.kto_reference_point(X[:0], X[:0]), "at least one response, got none"),
        (lambda: F.orpo_loss(X[:0], X[:0], 0.1), "at least one pair, got none"),
        (lambda: F.bradley_terry_loss(X[:0], X[:0]), "at least one pair, got none"),
        (lambda: F.preference_accuracy(X[:0], X[:0]), "at least one pair, got none"),
    ],
)  # fmt: skip
def test_arguments_without_meaning_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()
