"""Advantages that need no value head."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from rlhf_lab.functional import (
    compute_advantages,
    dr_grpo_advantages,
    grpo_advantages,
    informative_groups,
    opo_advantages,
    prompt_groups,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rewards_to_go,
    rloo_advantages,
    teaching_groups,
    token_rewards,
    whiten,
    whiten_over_groups,
)

NAN, INF = float("nan"), float("inf")
number = st.floats(-10, 10, width=32)


@st.composite
def batches(draw):
    batch, gen = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    row = st.lists(number, min_size=gen, max_size=gen)
    keep = st.lists(st.booleans(), min_size=gen, max_size=gen)
    paid = draw(st.lists(row, min_size=batch, max_size=batch))
    mask = draw(st.lists(keep, min_size=batch, max_size=batch))
    group = draw(st.lists(st.integers(0, 2), min_size=batch, max_size=batch))
    return tensor(paid, dtype=torch.float64), tensor(mask), tensor(group)


def to_go_by_loop(paid, mask, gamma):
    out = np.zeros(paid.shape)
    for i, (row, keep) in enumerate(zip(paid.tolist(), mask.tolist(), strict=True)):
        real = [t for t, k in enumerate(keep) if k]
        for k, t in enumerate(real):
            out[i, t] = math.fsum(gamma**j * row[u] for j, u in enumerate(real[k:]))
    return out


def whiten_by_numpy(x, mask):
    real = x[mask]
    if real.size == 0:
        return np.zeros_like(x)
    var = real.var(ddof=1) if real.size > 1 else 0.0
    return np.where(mask, (x - real.mean()) / math.sqrt(var + 1e-8), 0.0)


def test_prompt_groups_by_hand_and_refused():
    assert prompt_groups(6, 3).tolist() == [0, 0, 0, 1, 1, 1]
    assert prompt_groups(2, 1).tolist() == [0, 1]
    for num_samples in (0, 4):
        with pytest.raises(ValueError, match=f"num_samples must .*6 sequences, got {num_samples}"):
            prompt_groups(6, num_samples)


@pytest.mark.parametrize("value", [0.7, 12.3, 100.1, 1000.1])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 16])
def test_groups_of_equal_rewards_get_exactly_zero_although_their_mean_is_rounded(value, size):
    """0.37 for eight rewards of 1000.1 where the rounded mean is divided by its own deviation."""
    rewards = torch.full((2 * size,), value)
    rewards[size:] = 0.1
    group, mask = prompt_groups(2 * size, size), torch.ones(2 * size, 3, dtype=torch.bool)
    mask[1, 1:] = False
    found = (
        rloo_advantages(rewards, group),
        grpo_advantages(rewards, group),
        dr_grpo_advantages(rewards, group),
        opo_advantages(rewards, group, mask),
        reinforce_plus_plus_baseline_advantages(rewards, group, mask),
        reinforce_plus_plus_advantages(
            token_rewards(rewards[:size], mask[:size]), 1.0, mask[:size]
        ),
    )
    for advantages in found:
        assert (advantages == 0).all()


def test_groups_of_equal_rewards_teach_nothing():
    rewards, group = tensor([1.0, 2.0, 2.0, 5.0, 5.0, 7.0]), tensor([0, 0, 0, 1, 1, 2])
    assert informative_groups(rewards, group).tolist() == [True] * 3 + [False] * 3


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_informative_groups_equal_a_loop(pairs):
    rewards, group = tensor([float(r) for r, _ in pairs]), tensor([g for _, g in pairs])
    expected = [len({r for r, g in pairs if g == own}) > 1 for _, own in pairs]
    assert informative_groups(rewards, group).tolist() == expected


def test_rewards_to_go_by_hand():
    # 1 + 0.5 * (2 + 0.5 * 4) = 3; a hole is stepped over without a discount: 1 + 0.5 * 4 = 3
    paid = tensor([[1.0, 2.0, 4.0], [1.0, NAN, 4.0]])
    mask = tensor([[1, 1, 1], [1, 0, 1]]).bool()
    assert rewards_to_go(paid, 0.5, mask).tolist() == [[3.0, 4.0, 4.0], [3.0, 0.0, 4.0]]


@given(batches(), st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_reinforce_and_its_whitened_form_equal_loops(batch, gamma):
    paid, mask, _ = batch
    to_go = to_go_by_loop(paid, mask, gamma)
    np.testing.assert_allclose(rewards_to_go(paid, gamma, mask).numpy(), to_go, atol=1e-9)
    got = reinforce_plus_plus_advantages(paid, gamma, mask).numpy()
    np.testing.assert_allclose(got, whiten_by_numpy(to_go, mask.numpy()), rtol=1e-5, atol=1e-6)


def test_reinforce_plus_plus_by_hand():
    # to go: 3, 1 and 2: mean 2, variance (1 + 1 + 0) / 2 = 1
    paid, mask = tensor([[2.0, 1.0], [2.0, NAN]]), tensor([[1, 1], [1, 0]]).bool()
    got = reinforce_plus_plus_advantages(paid, 1.0, mask).flatten().tolist()
    assert got == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-6)


def test_reinforce_plus_plus_with_baseline_by_hand():
    # group means 2 and 5: -1, 1, 0, the last with two tokens; mean 0, variance 2 / 3
    rewards, group = tensor([1.0, 3.0, 5.0]), tensor([0, 0, 1])
    mask = tensor([[1, 0], [0, 1], [1, 1]]).bool()
    root = math.sqrt(2 / 3)
    got = reinforce_plus_plus_baseline_advantages(rewards, group, mask).flatten().tolist()
    assert got == pytest.approx([-1 / root, 0, 0, 1 / root, 0, 0], abs=1e-5)


def test_reinforce_plus_plus_with_baseline_leaves_groups_of_equal_rewards_at_zero():
    # -1 once, 1 on three tokens, 0 on two of equal reward: mean 1/3, sum of squares 4 - 6/9,
    # variance 2/3; whitened with the others, the last would be at -0.41
    rewards, group = tensor([1.0, 3.0, 5.0, 5.0]), tensor([0, 0, 1, 1])
    mask = tensor([[1, 0, 0], [1, 1, 1], [1, 0, 0], [1, 0, 0]]).bool()
    root, got = math.sqrt(2 / 3), reinforce_plus_plus_baseline_advantages(rewards, group, mask)
    assert got[:2].flatten().tolist() == pytest.approx(
        [-4 / 3 / root, 0, 0, *[2 / 3 / root] * 3], abs=1e-5
    )
    assert (got[2:] == 0).all()


def test_a_group_teaches_if_one_of_its_advantages_is_not_zero():
    advantages = tensor([[0.0, 0.0], [0.0, -2.0], [0.0, 0.0], [0.0, 0.0], [1e-30, 0.0]])
    group = tensor([3, 3, 1, 1, 0])
    assert teaching_groups(advantages, group).tolist() == [True, True, False, False, True]
    assert teaching_groups(advantages[:0], group[:0]).shape == (0,)


@given(batches())
@settings(max_examples=50, deadline=None)
def test_the_groups_that_teach_by_rewards_alone_are_the_informative_ones(batch):
    paid, mask, group = batch
    rewards = paid[:, 0]
    advantages = dr_grpo_advantages(rewards, group)[:, None].expand(mask.shape)
    assert torch.equal(teaching_groups(advantages, group), informative_groups(rewards, group))


def test_whitening_over_groups_by_hand():
    """1, 3 and 3 on three tokens of a group that teaches, 0 on three of one that does not.

    Mean 7/3, variance ((4/3)^2 + 2 (2/3)^2) / 2 = 4/3. Over all six the mean would be 7/6, and the
    zeros would go to -0.79.
    """
    advantages = tensor([[1.0, 3.0], [3.0, NAN], [0.0, 0.0], [0.0, NAN]])
    mask = tensor([[1, 1], [1, 0], [1, 1], [1, 0]]).bool()
    got = whiten_over_groups(advantages, mask, tensor([True, True, False, False]))
    root = math.sqrt(4 / 3)
    low, high = -4 / 3 / root, 2 / 3 / root
    assert got[:2].flatten().tolist() == pytest.approx([low, high, high, 0.0], abs=1e-6)
    assert (got[2:] == 0).all()


@given(batches(), st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_whitening_over_groups_is_whitening_of_those_that_teach_alone(batch, others):
    """However many groups without information stand beside them; with none, to the bit."""
    paid, mask, _ = batch
    advantages = to_go_by_loop(paid, mask, 1.0)
    advantages = torch.as_tensor(advantages)
    alone = whiten(advantages, mask)
    assert torch.equal(whiten_over_groups(advantages, mask), alone)
    assert torch.equal(
        whiten_over_groups(advantages, mask, torch.ones(len(mask), dtype=torch.bool)), alone
    )
    zeros = advantages.new_zeros(others, mask.shape[1])
    among = torch.cat([zeros, advantages])
    seen = torch.cat([torch.ones_like(zeros, dtype=torch.bool), mask])
    teaching = torch.arange(len(among)) >= others
    got = whiten_over_groups(among, seen, teaching)
    np.testing.assert_allclose(got[others:].numpy(), alone.numpy(), rtol=1e-5, atol=1e-6)
    assert (got[:others] == 0).all()


def test_whitening_over_groups_where_none_teaches_or_only_one_token_does():
    mask, none = torch.ones(2, 2, dtype=torch.bool), torch.zeros(2, dtype=torch.bool)
    assert (whiten_over_groups(torch.ones(2, 2), mask, none) == 0).all()
    mask[0, 1] = False
    assert (whiten_over_groups(torch.ones(2, 2), mask, tensor([True, False])) == 0).all()
    assert whiten_over_groups(torch.ones(2, 2).half(), mask, none).dtype == torch.float32


def test_the_gradient_of_whitening_over_groups_is_right_and_zero_where_nothing_teaches():
    advantages = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    mask, teaching = tensor([[1, 1], [1, 1], [1, 0]]).bool(), tensor([True, False, True])
    whitened = lambda x: whiten_over_groups(x, mask, teaching)
    assert torch.autograd.gradcheck(whitened, advantages)
    (slope,) = torch.autograd.grad((whitened(advantages) ** 3).sum(), advantages)
    assert (slope[1] == 0).all() and (slope[0] != 0).all()


@given(batches())
@settings(max_examples=50, deadline=None)
def test_group_baselines_equal_loops(batch):
    paid, mask, group = batch
    rewards, lengths = paid[:, 0], mask.sum(dim=-1)
    centered, weighted = [], []
    for i, own in enumerate(group.tolist()):
        mates = [j for j, other in enumerate(group.tolist()) if other == own]
        r, n = [rewards[j].item() for j in mates], [lengths[j].item() for j in mates]
        centered.append(rewards[i].item() - np.mean(r))
        baseline = np.dot(r, n) / sum(n) if sum(n) else 0.0
        weighted.append(rewards[i].item() - baseline)
    tiled = np.repeat(np.array(centered)[:, None], mask.shape[1], axis=1)
    got = dr_grpo_advantages(rewards, group).tolist()
    assert got == pytest.approx(centered, abs=1e-9)
    assert opo_advantages(rewards, group, mask).tolist() == pytest.approx(weighted, abs=1e-9)
    whitened = whiten_by_numpy(tiled, mask.numpy())
    whitened[~informative_groups(rewards, group).numpy()] = 0
    got = reinforce_plus_plus_baseline_advantages(rewards, group, mask).numpy()
    np.testing.assert_allclose(got, whitened, rtol=1e-5, atol=1e-5)


def test_opo_by_hand():
    # lengths 1 and 3: baseline (1 * 2 + 3 * 6) / 4 = 5; the mean would be 4
    mask = tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0]]).bool()
    got = opo_advantages(tensor([2.0, 6.0, 9.0]), tensor([0, 0, 1]), mask)
    assert got.tolist() == [-3.0, 1.0, 9.0]


def test_remax_by_hand():
    paid = tensor([[-0.5, 3.0, NAN], [1.0, 1.0, 1.0]])
    mask = tensor([[1, 1, 0], [1, 1, 1]]).bool()
    # to go 2.5, 3 less 1; 3, 2, 1 less 2
    got = remax_advantages(paid, tensor([1.0, 2.0]), mask)
    assert got.tolist() == [[1.5, 2.0, 0.0], [1.0, 0.0, -1.0]]


@given(batches())
@settings(max_examples=30, deadline=None)
def test_remax_of_a_reward_at_the_end_is_its_difference_from_greedy(batch):
    paid, mask, _ = batch
    rewards, greedy = paid[:, 0], paid[:, -1]
    got = remax_advantages(token_rewards(rewards, mask), greedy, mask)
    expected = torch.where(mask, (rewards - greedy)[:, None], 0.0)
    torch.testing.assert_close(got, expected)


def test_one_step_by_hand_with_rewards_on_the_way():
    # 1 + 0.5 * 4 - 2 = 1 (the hole is stepped over); 3 + 0 - 4 = -1
    values, paid = tensor([[2.0, NAN, 4.0]]), tensor([[1.0, NAN, 3.0]])
    mask = tensor([[True, False, True]])
    assert compute_advantages(values, paid, mask, 0.5).tolist() == [[1.0, 0.0, -1.0]]


@given(batches())
@settings(max_examples=30, deadline=None)
def test_a_reward_per_sequence_is_one_per_token_paid_at_the_end_to_the_bit(batch):
    values, mask, _ = batch
    rewards = values[:, 0]
    got = compute_advantages(values, token_rewards(rewards, mask), mask)
    assert torch.equal(got, compute_advantages(values, rewards, mask))


def test_one_sequence_of_one_token():
    one, group, mask = tensor([3.0]), tensor([0]), tensor([[True]])
    assert rewards_to_go(one[:, None]).tolist() == [[3.0]]
    assert reinforce_plus_plus_advantages(one[:, None]).tolist() == [[0.0]]
    assert reinforce_plus_plus_baseline_advantages(one, group, mask).tolist() == [[0.0]]
    assert dr_grpo_advantages(one, group).tolist() == [0.0]
    assert opo_advantages(one, group, mask).tolist() == [0.0]
    assert remax_advantages(one[:, None], one).tolist() == [[0.0]]
    assert informative_groups(one, group).tolist() == [False]


def test_all_masked_rows_get_zero_whatever_stands_in_them():
    paid, mask = torch.full((2, 3), NAN), torch.zeros(2, 3).bool()
    rewards, group = tensor([1.0, 2.0]), tensor([0, 0])
    assert (rewards_to_go(paid, mask=mask) == 0).all()
    assert (reinforce_plus_plus_advantages(paid, mask=mask) == 0).all()
    assert (reinforce_plus_plus_baseline_advantages(rewards, group, mask) == 0).all()
    assert (remax_advantages(paid, rewards, mask) == 0).all()


def test_a_discount_beyond_one_is_refused():
    for function in (rewards_to_go, reinforce_plus_plus_advantages):
        with pytest.raises(ValueError, match=r"gamma must .*got 1\.5"):
            function(torch.zeros(1, 1), 1.5)
    with pytest.raises(ValueError, match="gamma must .*got -1"):
        compute_advantages(torch.zeros(1, 1), torch.zeros(1), gamma=-1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    # 4 * 60000 = 240000 is beyond float16
    big = torch.full((1, 4), 59904.0, dtype=dtype)
    assert rewards_to_go(big)[0, 0].item() == 4 * 59904.0
    mask, group = torch.ones(4, 2).bool(), torch.zeros(4, dtype=torch.long)
    assert opo_advantages(big[0], group, mask).tolist() == [0.0] * 4
    assert dr_grpo_advantages(big[0], group).tolist() == [0.0] * 4
    assert reinforce_plus_plus_baseline_advantages(big[0], group, mask).dtype == torch.float32
    assert remax_advantages(big, big[0, :1])[0, 0].item() == 3 * 59904.0


def test_rewards_near_the_end_of_float32_stay_finite():
    rewards, group = tensor([1e37, -1e37]), tensor([0, 0])
    assert dr_grpo_advantages(rewards, group).tolist() == pytest.approx([1e37, -1e37])
    mask = torch.ones(2, 1).bool()
    assert opo_advantages(rewards, group, mask).isfinite().all()
    assert rewards_to_go(rewards[None]).isfinite().all()


def test_gradients_agree_with_finite_differences():
    torch.manual_seed(0)
    paid, values = torch.randn(2, 4, 3, dtype=torch.float64).requires_grad_()
    rewards = torch.randn(4, dtype=torch.float64, requires_grad=True)
    mask = tensor([[1, 0, 1], [1, 1, 1], [0, 0, 0], [1, 1, 0]]).bool()
    group = tensor([0, 0, 1, 1])
    check = torch.autograd.gradcheck
    assert check(lambda p: rewards_to_go(p, 0.9, mask), paid)
    assert check(lambda p: reinforce_plus_plus_advantages(p, 0.9, mask), paid)
    assert check(lambda r: reinforce_plus_plus_baseline_advantages(r, group, mask), rewards)
    assert check(lambda p, r: remax_advantages(p, r, mask), (paid, rewards))
    assert check(lambda r: dr_grpo_advantages(r, group), rewards)
    assert check(lambda r: opo_advantages(r, group, mask), rewards)
    assert check(lambda v, p: compute_advantages(v, p, mask, 0.9), (values, paid))


def test_nan_under_the_mask_leaves_the_gradient_alone():
    paid = tensor([[1.0, NAN, 2.0, INF]], requires_grad=True)
    mask = tensor([[True, False, True, False]])
    both = reinforce_plus_plus_advantages(paid, 0.9, mask) + remax_advantages(
        paid, tensor([1.0]), mask
    )
    both.square().sum().backward()
    assert paid.grad.isfinite().all() and (paid.grad[~mask] == 0).all()


def test_grpo_advantages_ignore_a_common_offset():
    rewards, group = tensor([0.1, 0.9, 0.3, 0.7]), tensor([0, 0, 1, 1])
    shifted = (rewards + 1000) - 1000  # what float32 keeps of the rewards at that offset
    expected = grpo_advantages(shifted.double(), group)
    got = grpo_advantages(rewards + 1000, group)
    assert torch.allclose(got.double(), expected, rtol=1e-6)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("estimator", [grpo_advantages, rloo_advantages])
def test_group_of_another_length_is_named_in_the_error(estimator):
    with pytest.raises(
        ValueError, match=r"group has shape \(3,\), expected \(4,\) to match rewards"
    ):
        estimator(torch.ones(4), tensor([0, 0, 1]))
