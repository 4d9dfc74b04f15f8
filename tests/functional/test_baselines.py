"""Advantages without a value head."""

import math

import pytest
import torch
from torch import tensor

from rlhf_lab import functional as F

NAN = float("nan")
ROOT = math.sqrt(2 / 3)


def test_prompt_groups_match_hand_computed():
    assert F.prompt_groups(6, 3).tolist() == [0, 0, 0, 1, 1, 1]
    assert F.prompt_groups(2, 1).tolist() == [0, 1]
    for num_samples in (0, 4):
        with pytest.raises(ValueError, match=f"num_samples must .*6 sequences, got {num_samples}"):
            F.prompt_groups(6, num_samples)


def test_rloo_matches_hand_computed():
    # group 7: 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2; group -1: 5 - 3, 3 - 5
    rewards, group = tensor([1.0, 5.0, 2.0, 3.0, 6.0]), tensor([7, -1, 7, -1, 7])
    assert F.rloo_advantages(rewards, group).tolist() == [-3.0, 2.0, -1.5, -2.0, 4.5]
    with pytest.raises(ValueError, match="group 4 has one sequence"):
        F.rloo_advantages(tensor([1.0, 2.0, 3.0]), tensor([0, 0, 4]))


def test_grpo_matches_hand_computed():
    # mean 3, unbiased std sqrt((4 + 1 + 9) / 2) = sqrt 7; a group of one gets 0
    rewards, group = tensor([1.0, 2.0, 6.0, 100.0]), tensor([3, 3, 3, 8])
    scale = math.sqrt(7) + 1e-4
    expected = [-2 / scale, -1 / scale, 3 / scale, 0.0]
    assert F.grpo_advantages(rewards, group).tolist() == pytest.approx(expected)
    got = F.grpo_advantages(rewards, group, eps=0.5)[2].item()
    assert got == pytest.approx(3 / (scale + 0.4999))
    assert F.dr_grpo_advantages(rewards, group).tolist() == [-2.0, -1.0, 3.0, 0.0]


def test_estimators_ignore_a_common_offset():
    rewards, group = tensor([0.1, 0.9, 0.3, 0.7]), tensor([0, 0, 1, 1])
    mask = tensor([[1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 0, 0]]).bool()
    shifted = (rewards + 1000) - 1000  # what float32 keeps of the rewards at that offset
    for estimate in (F.grpo_advantages, F.rloo_advantages, lambda *x: F.opo_advantages(*x, mask)):
        expected = estimate(shifted.double(), group)
        assert torch.allclose(estimate(rewards + 1000, group).double(), expected, rtol=1e-6)


def test_opo_matches_hand_computed():
    # lengths 1 and 3: baseline (1 * 2 + 3 * 6) / 4 = 5; a group without a token keeps its rewards
    mask = tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0]]).bool()
    got = F.opo_advantages(tensor([2.0, 6.0, 9.0]), tensor([0, 0, 1]), mask)
    assert got.tolist() == [-3.0, 1.0, 9.0]


@pytest.mark.parametrize("value", [0.7, 12.3, 100.1, 1000.1])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 16])
def test_groups_of_equal_rewards_get_exactly_zero(value, size):
    """The mean is rounded; divided by its own deviation, 8 rewards of 1000.1 would get 0.37."""
    rewards = torch.full((2 * size,), value, requires_grad=True)
    group, mask = F.prompt_groups(2 * size, size), torch.ones(2 * size, 3, dtype=torch.bool)
    mask[1, 1:] = False
    found = [
        F.rloo_advantages(rewards, group),
        F.grpo_advantages(rewards, group),
        F.dr_grpo_advantages(rewards, group),
        F.opo_advantages(rewards, group, mask),
        F.reinforce_plus_plus_baseline_advantages(rewards, group, mask),
        F.reinforce_plus_plus_advantages(F.token_rewards(rewards, mask), 1.0, mask),
    ]
    assert not any(advantages.any() for advantages in found)
    sum(
        (x * torch.arange(1.0, 1 + len(x)).view(-1, *[1] * (x.ndim - 1))).sum() for x in found
    ).backward()
    assert rewards.grad.isfinite().all()


def test_informative_and_teaching_groups_match_hand_computed():
    rewards, group = tensor([1.0, 2.0, 2.0, 5.0, 5.0, 7.0]), tensor([0, 0, 0, 1, 1, 2])
    assert F.informative_groups(rewards, group).tolist() == [True] * 3 + [False] * 3
    advantages = tensor([[0.0, 0.0], [0.0, -2.0], [0.0, 0.0], [0.0, 0.0], [1e-30, 0.0]])
    group = tensor([3, 3, 1, 1, 0])
    assert F.teaching_groups(advantages, group).tolist() == [True, True, False, False, True]
    assert F.teaching_groups(advantages[:0], group[:0]).shape == (0,)


def test_rewards_to_go_match_hand_computed():
    # 1 + 0.5 * (2 + 0.5 * 4) = 3; a hole is stepped over without a discount: 1 + 0.5 * 4 = 3
    rewards = tensor([[1.0, 2.0, 4.0], [1.0, NAN, 4.0]])
    mask = tensor([[1, 1, 1], [1, 0, 1]]).bool()
    assert F.rewards_to_go(rewards, 0.5, mask).tolist() == [[3.0, 4.0, 4.0], [3.0, 0.0, 4.0]]
    assert F.rewards_to_go(tensor([[3.0]])).tolist() == [[3.0]]


def test_remax_matches_hand_computed():
    rewards = tensor([[-0.5, 3.0, NAN], [1.0, 1.0, 1.0]])
    mask = tensor([[1, 1, 0], [1, 1, 1]]).bool()
    # to go 2.5, 3 minus 1; 3, 2, 1 minus 2
    got = F.remax_advantages(rewards, tensor([1.0, 2.0]), mask)
    assert got.tolist() == [[1.5, 2.0, 0.0], [1.0, 0.0, -1.0]]


def test_reinforce_plus_plus_matches_hand_computed():
    # to go: 3, 1 and 2: mean 2, variance (1 + 1 + 0) / 2 = 1
    rewards, mask = tensor([[2.0, 1.0], [2.0, NAN]]), tensor([[1, 1], [1, 0]]).bool()
    got = F.reinforce_plus_plus_advantages(rewards, 1.0, mask).flatten().tolist()
    assert got == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-6)
    assert F.reinforce_plus_plus_advantages(tensor([[3.0]])).tolist() == [[0.0]]


def test_reinforce_plus_plus_baseline_matches_hand_computed():
    # group means 2 and 5: -1, 1, 0, the last with two tokens; mean 0, variance 2 / 3
    rewards, group = tensor([1.0, 3.0, 5.0]), tensor([0, 0, 1])
    mask = tensor([[1, 0], [0, 1], [1, 1]]).bool()
    got = F.reinforce_plus_plus_baseline_advantages(rewards, group, mask).flatten().tolist()
    assert got == pytest.approx([-1 / ROOT, 0, 0, 1 / ROOT, 0, 0], abs=1e-5)
    # -1 once, 1 on three tokens, 0 on two of a group of equal rewards: mean 1/3, variance 2/3;
    # whitened with the others, the last group would get -0.41
    rewards, group = tensor([1.0, 3.0, 5.0, 5.0]), tensor([0, 0, 1, 1])
    mask = tensor([[1, 0, 0], [1, 1, 1], [1, 0, 0], [1, 0, 0]]).bool()
    got = F.reinforce_plus_plus_baseline_advantages(rewards, group, mask)
    expected = [-4 / 3 / ROOT, 0, 0, *[2 / 3 / ROOT] * 3]
    assert got[:2].flatten().tolist() == pytest.approx(expected, abs=1e-5)
    assert not got[2:].any()


def test_whiten_over_groups_matches_hand_computed():
    """1, 3 and 3 in a teaching group: mean 7/3, variance ((4/3)^2 + 2 (2/3)^2) / 2 = 4/3.

    Over all six tokens the mean would be 7/6, and the zeros would become -0.79.
    """
    advantages = tensor([[1.0, 3.0], [3.0, NAN], [0.0, 0.0], [0.0, NAN]])
    mask = tensor([[1, 1], [1, 0], [1, 1], [1, 0]]).bool()
    got = F.whiten_over_groups(advantages, mask, tensor([True, True, False, False]))
    low, high = -4 / 3 / math.sqrt(4 / 3), 2 / 3 / math.sqrt(4 / 3)
    assert got[:2].flatten().tolist() == pytest.approx([low, high, high, 0.0], abs=1e-6)
    assert not got[2:].any()
    assert not F.whiten_over_groups(advantages, mask, torch.zeros(4).bool()).any()
