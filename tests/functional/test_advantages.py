"""Advantages, returns and rewards per token and per sequence."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from rlhf_lab.functional import (
    compute_advantages,
    compute_gae,
    compute_returns,
    explained_variance,
    grpo_advantages,
    rloo_advantages,
    token_rewards,
)

NAN = float("nan")
number = st.floats(-10, 10, width=32)


@st.composite
def rollouts(draw):
    batch, gen = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    grid = st.lists(st.lists(number, min_size=gen, max_size=gen), min_size=batch, max_size=batch)
    keep = st.lists(
        st.lists(st.booleans(), min_size=gen, max_size=gen), min_size=batch, max_size=batch
    )
    values = tensor(draw(grid), dtype=torch.float64)
    rewards = tensor(draw(st.lists(number, min_size=batch, max_size=batch)), dtype=torch.float64)
    return values, tensor(draw(grid), dtype=torch.float64), rewards, tensor(draw(keep))


def gae_by_sums(values, rewards, gamma, lam, mask):
    """Equation 16 as a double sum in numpy, on each row with its masked tokens taken out."""
    out = np.zeros(values.shape)
    for row in range(values.shape[0]):
        real = [t for t in range(values.shape[1]) if mask[row, t]]
        v = [values[row, t].item() for t in real] + [0.0]
        delta = [rewards[row, t].item() + gamma * v[k + 1] - v[k] for k, t in enumerate(real)]
        for k, t in enumerate(real):
            out[row, t] = sum((gamma * lam) ** (j - k) * delta[j] for j in range(k, len(real)))
    return out


def test_one_step_advantages_by_hand():
    values, rewards = tensor([[1.0, 3.0, 2.0], [0.5, 0.0, -1.0]]), tensor([10.0, -2.0])
    # row 0: 3 - 1, 2 - 3, 10 - 2; row 1: 0 - 0.5, -1 - 0, -2 - (-1)
    expected = [[2.0, -1.0, 8.0], [-0.5, -1.0, -1.0]]
    assert compute_advantages(values, rewards).tolist() == expected


def test_one_step_advantages_pay_the_reward_at_the_last_real_token():
    values = tensor([[1.0, 3.0, NAN], [1.0, NAN, 4.0], [NAN, NAN, NAN]])
    mask = tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]]).bool()
    # row 0: 3 - 1, 10 - 3; row 1 steps over the hole: 4 - 1, 20 - 4; row 2 has no token
    got = compute_advantages(values, tensor([10.0, 20.0, 30.0]), mask)
    assert got.tolist() == [[2.0, 7.0, 0.0], [3.0, 0.0, 16.0], [0.0, 0.0, 0.0]]


@given(rollouts())
@settings(max_examples=40, deadline=None)
def test_one_step_advantages_telescope_to_reward_minus_first_value(rollout):
    values, _, rewards, mask = rollout
    got = compute_advantages(values, rewards, mask).sum(dim=-1)
    for row in range(len(values)):
        real = values[row][mask[row]].tolist()
        expected = rewards[row].item() - real[0] if real else 0.0
        assert got[row].item() == pytest.approx(expected, abs=1e-9)


def test_gae_by_hand():
    # delta_1 = 4 - 2 = 2; delta_0 = 1 + 0.5 * 2 - 1 = 1; A_0 = 1 + 0.5 * 0.5 * 2 = 1.5
    got = compute_gae(tensor([[1.0, 2.0]]), tensor([[1.0, 4.0]]), gamma=0.5, lam=0.5)
    assert got.tolist() == [[1.5, 2.0]]


def test_gae_carries_value_and_advantage_over_a_hole():
    values, rewards = tensor([[1.0, NAN, 2.0, NAN]]), tensor([[1.0, NAN, 4.0, 9.0]])
    mask = tensor([[True, False, True, False]])
    assert compute_gae(values, rewards, 0.5, 0.5, mask).tolist() == [[1.5, 0.0, 2.0, 0.0]]


@given(rollouts(), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_gae_equals_the_double_sum_of_its_definition(rollout, gamma, lam):
    values, rewards, _, mask = rollout
    got = compute_gae(values, rewards, gamma, lam, mask).numpy()
    expected = gae_by_sums(values, rewards, gamma, lam, mask)
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


@given(rollouts())
@settings(max_examples=40, deadline=None)
def test_gae_with_lambda_zero_is_the_one_step_estimate(rollout):
    values, _, rewards, mask = rollout
    paid = token_rewards(rewards, mask)
    torch.testing.assert_close(
        compute_gae(values, paid, gamma=1.0, lam=0.0, mask=mask),
        compute_advantages(values, rewards, mask),
    )


@given(rollouts(), st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_gae_with_lambda_one_is_reward_to_go_minus_value(rollout, gamma):
    values, rewards, _, mask = rollout
    got = compute_gae(values, rewards, gamma, 1.0, mask)
    for row in range(len(values)):
        real = mask[row].nonzero().flatten().tolist()
        for k, t in enumerate(real):
            to_go = sum(gamma**j * rewards[row, u].item() for j, u in enumerate(real[k:]))
            assert got[row, t].item() == pytest.approx(to_go - values[row, t].item(), abs=1e-9)


@pytest.mark.parametrize("name, gamma, lam", [("gamma", 1.1, 0.9), ("lam", 1.0, -0.1)])
def test_gae_refuses_discounts_outside_zero_to_one(name, gamma, lam):
    with pytest.raises(ValueError, match=name):
        compute_gae(torch.zeros(1, 1), torch.zeros(1, 1), gamma, lam)


def test_one_sequence_of_one_token():
    value, reward = tensor([[2.0]]), tensor([5.0])
    assert compute_advantages(value, reward).tolist() == [[3.0]]
    assert compute_gae(value, reward[:, None]).tolist() == [[3.0]]
    assert explained_variance(value, value).item() == 0.0


def test_returns_are_the_targets_of_the_values():
    advantages, values = tensor([[1.5, NAN]]), tensor([[2.0, 7.0]])
    assert compute_returns(advantages, values, tensor([[True, False]])).tolist() == [[3.5, 0.0]]
    # one step: A + V is the next value, and the reward at the end
    values, rewards = tensor([[1.0, 3.0, 2.0]]), tensor([10.0])
    returns = compute_returns(compute_advantages(values, rewards), values)
    assert returns.tolist() == [[3.0, 2.0, 10.0]]


def test_explained_variance_by_hand():
    returns = tensor([[1.0, 2.0, 3.0, NAN]])
    mask = tensor([[True, True, True, False]])
    # Var(R) = 1; errors (0, 1, 0): mean 1/3, squares (1 + 4 + 1) / 9 / 2 = 1/3
    values = tensor([[1.0, 1.0, 3.0, 5.0]])
    assert explained_variance(values, returns, mask).item() == pytest.approx(2 / 3)
    assert explained_variance(returns, returns, mask).item() == 1.0
    # a constant shift is no error of variance; the mean alone explains nothing; -R gives 1 - 4
    assert explained_variance(returns + 7, returns, mask).item() == pytest.approx(1.0)
    assert explained_variance(torch.full_like(returns, 2.0), returns, mask).item() == 0.0
    assert explained_variance(-returns, returns, mask).item() == pytest.approx(-3.0)


def test_explained_variance_of_constant_returns_is_zero():
    returns = torch.full((1, 7), 0.1)
    assert explained_variance(torch.randn(1, 7), returns).item() == 0.0
    assert explained_variance(returns, returns, torch.zeros(1, 7).bool()).item() == 0.0


@given(rollouts())
@settings(max_examples=40, deadline=None)
def test_explained_variance_equals_numpy(rollout):
    values, returns, _, mask = rollout
    v, r = values[mask].numpy(), returns[mask].numpy()
    spread = r.var() if r.size else 0.0
    if spread < 1e-6:
        return
    got = explained_variance(values, returns, mask).item()
    assert got == pytest.approx(1 - (r - v).var() / spread, rel=1e-6, abs=1e-6)


def test_token_rewards_by_hand():
    mask = tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]]).bool()
    rewards = tensor([2.0, -1.0, 5.0])
    no_kl = token_rewards(rewards, mask)
    assert no_kl.tolist() == [[0.0, 2.0, 0.0], [0.0, 0.0, -1.0], [0.0, 0.0, 0.0]]
    kl = tensor([[0.5, 1.0, NAN], [2.0, NAN, -1.0], [NAN, NAN, NAN]])
    # 0 - 0.1 * 0.5, 2 - 0.1 * 1; 0 - 0.1 * 2, -1 - 0.1 * -1
    got = token_rewards(rewards, mask, kl, 0.1)
    assert got.flatten().tolist() == pytest.approx([-0.05, 1.9, 0, -0.2, 0, -0.9, 0, 0, 0])


def test_rewards_of_tokens_stay_where_they_are_by_hand():
    mask = tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]]).bool()
    rewards = tensor([[2.0, -1.0, NAN], [5.0, NAN, 0.5], [NAN, NAN, NAN]])
    kept = [[2.0, -1.0, 0.0], [5.0, 0.0, 0.5], [0.0, 0.0, 0.0]]
    assert token_rewards(rewards, mask).tolist() == kept
    kl = tensor([[0.5, 1.0, NAN], [2.0, NAN, -1.0], [NAN, NAN, NAN]])
    # 2 - 0.1 * 0.5, -1 - 0.1 * 1; 5 - 0.1 * 2, 0.5 - 0.1 * -1
    got = token_rewards(rewards, mask, kl, 0.1)
    assert got.flatten().tolist() == pytest.approx([1.95, -1.1, 0, 4.8, 0, 0.6, 0, 0, 0])
    half = token_rewards(rewards.bfloat16(), mask)
    assert half.dtype == torch.float32 and half.tolist() == kept


def test_the_score_is_paid_once_and_exactly_at_the_last_real_token():
    # torchrl pays rows that stopped early twice; torchtune pays one token after the last
    mask = tensor([[True, True, False, False], [True, True, True, True]])
    paid = token_rewards(tensor([3.0, 5.0]), mask)
    assert paid.tolist() == [[0.0, 3.0, 0.0, 0.0], [0.0, 0.0, 0.0, 5.0]]


@given(rollouts(), number)
@settings(max_examples=40, deadline=None)
def test_token_rewards_sum_to_reward_minus_kl(rollout, kl_coef):
    kl, _, rewards, mask = rollout
    total = token_rewards(rewards, mask, kl, kl_coef).sum(dim=-1)
    for row in range(len(kl)):
        real = kl[row][mask[row]].tolist()
        expected = rewards[row].item() - kl_coef * math.fsum(real) if real else 0.0
        assert total[row].item() == pytest.approx(expected, abs=1e-9)


def test_token_rewards_refuse_a_coefficient_without_kl():
    with pytest.raises(ValueError, match="kl_per_token is missing"):
        token_rewards(tensor([1.0]), tensor([[True]]), kl_coef=0.1)


def test_rloo_by_hand():
    # group 7: 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2; group -1: 5 - 3, 3 - 5
    rewards, group = tensor([1.0, 5.0, 2.0, 3.0, 6.0]), tensor([7, -1, 7, -1, 7])
    assert rloo_advantages(rewards, group).tolist() == [-3.0, 2.0, -1.5, -2.0, 4.5]


def test_rloo_refuses_a_group_of_one_and_names_it():
    with pytest.raises(ValueError, match="group 4 has one sequence"):
        rloo_advantages(tensor([1.0, 2.0, 3.0]), tensor([0, 0, 4]))


def test_grpo_by_hand():
    # mean 3, unbiased std sqrt((4 + 1 + 9) / 2) = sqrt 7; the group of one gets 0
    rewards, group = tensor([1.0, 2.0, 6.0, 100.0]), tensor([3, 3, 3, 8])
    scale = math.sqrt(7) + 1e-4
    expected = [-2 / scale, -1 / scale, 3 / scale, 0.0]
    assert grpo_advantages(rewards, group).tolist() == pytest.approx(expected)
    plain = grpo_advantages(rewards, group, normalize_std=False)
    assert plain.tolist() == [-2.0, -1.0, 3.0, 0.0]


def test_grpo_of_equal_rewards_is_zero_with_finite_gradient():
    rewards = tensor([2.0, 2.0, 2.0], requires_grad=True)
    advantages = grpo_advantages(rewards, tensor([0, 0, 0]))
    assert advantages.tolist() == [0.0, 0.0, 0.0]
    (advantages * tensor([1.0, 2.0, 3.0])).sum().backward()
    assert rewards.grad.isfinite().all()


@given(st.lists(st.tuples(number, st.integers(0, 2)), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_group_advantages_equal_a_loop_over_groups(pairs):
    pairs = pairs + [(reward + 1, group) for reward, group in pairs]
    rewards = tensor([r for r, _ in pairs], dtype=torch.float64)
    group = tensor([g for _, g in pairs])
    rloo, grpo = rloo_advantages(rewards, group), grpo_advantages(rewards, group)
    for i, (reward, own) in enumerate(pairs):
        everyone = [r for r, g in pairs if g == own]
        others = [r for j, (r, g) in enumerate(pairs) if g == own and j != i]
        assert rloo[i].item() == pytest.approx(reward - np.mean(others), abs=1e-9)
        scaled = (reward - np.mean(everyone)) / (np.std(everyone, ddof=1) + 1e-4)
        assert grpo[i].item() == pytest.approx(scaled, abs=1e-6)


def test_gradients_agree_with_finite_differences():
    torch.manual_seed(0)
    values = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    other = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    rewards = torch.randn(2, dtype=torch.float64, requires_grad=True)
    mask = tensor([[1, 0, 1, 0], [1, 1, 1, 1]]).bool()
    check = torch.autograd.gradcheck
    assert check(lambda v, r: compute_advantages(v, r, mask), (values, rewards))
    assert check(lambda v, r: compute_gae(v, r, 0.9, 0.8, mask), (values, other))
    assert check(lambda a, v: compute_returns(a, v, mask), (other, values))
    assert check(lambda v, r: explained_variance(v, r, mask), (values, other))
    assert check(lambda r, k: token_rewards(r, mask, k, 0.3), (rewards, other))
    assert check(lambda r, k: token_rewards(r, mask, k, 0.3), (values, other))
    four = torch.randn(4, dtype=torch.float64, requires_grad=True)
    group = tensor([0, 1, 0, 1])
    assert check(lambda r: rloo_advantages(r, group), four)
    assert check(lambda r: grpo_advantages(r, group), four)


def test_nan_under_the_mask_leaves_the_gradient_alone():
    values = tensor([[1.0, NAN, 2.0, NAN]], requires_grad=True)
    mask = tensor([[True, False, True, False]])
    got = compute_gae(values, tensor([[0.0, NAN, 1.0, NAN]]), mask=mask)
    (got + compute_advantages(values, tensor([1.0]), mask)).sum().backward()
    assert values.grad.isfinite().all() and (values.grad[~mask] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    values = tensor([[1.0, 3.0, 2.0]], dtype=dtype)
    advantages = compute_advantages(values, tensor([10.0], dtype=dtype))
    assert advantages.dtype == torch.float32 and advantages.tolist() == [[2.0, -1.0, 8.0]]
    assert compute_gae(values, values).dtype == torch.float32
    # float16 ends at 65504: the mean of four rewards of 60000 is 60000, not inf
    rewards = tensor([60000.0, 60000.0, 60000.0, 60000.0], dtype=dtype)
    group = torch.zeros(4, dtype=torch.long)
    assert rloo_advantages(rewards, group).tolist() == [0.0] * 4
    assert grpo_advantages(rewards, group).tolist() == [0.0] * 4
