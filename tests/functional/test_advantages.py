"""Advantages, returns, rewards per token and the loss of the value head."""

import pytest
import torch
from torch import tensor

from rlhf_lab import functional as F
from tests.functional.calls import draw

NAN, INF = float("nan"), float("inf")
HOLES = tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]]).bool()


def test_compute_advantages_matches_hand_computed():
    values = tensor([[1.0, 3.0, NAN], [1.0, NAN, 4.0], [NAN, NAN, NAN]])
    # row 0: 3 - 1, 10 - 3; row 1 steps over the hole: 4 - 1, 20 - 4; row 2 has no token
    got = F.compute_advantages(values, tensor([10.0, 20.0, 30.0]), HOLES)
    assert got.tolist() == [[2.0, 7.0, 0.0], [3.0, 0.0, 16.0], [0.0, 0.0, 0.0]]
    plain = F.compute_advantages(tensor([[1.0, 3.0, 2.0]]), tensor([10.0]))
    assert plain.tolist() == [[2.0, -1.0, 8.0]]
    # rewards per token: 1 + 0.5 * 4 - 2 over the hole, 3 + 0 - 4
    values, rewards = tensor([[2.0, NAN, 4.0]]), tensor([[1.0, NAN, 3.0]])
    assert F.compute_advantages(values, rewards, HOLES[1:2], 0.5).tolist() == [[1.0, 0.0, -1.0]]
    assert F.compute_advantages(tensor([[2.0]]), tensor([5.0])).tolist() == [[3.0]]


def test_compute_gae_matches_hand_computed():
    # delta_1 = 4 - 2 = 2; delta_0 = 1 + 0.5 * 2 - 1 = 1; A_0 = 1 + 0.5 * 0.5 * 2 = 1.5
    got = F.compute_gae(tensor([[1.0, 2.0]]), tensor([[1.0, 4.0]]), gamma=0.5, lam=0.5)
    assert got.tolist() == [[1.5, 2.0]]
    # value and advantage are carried over a hole
    values, rewards = tensor([[1.0, NAN, 2.0, NAN]]), tensor([[1.0, NAN, 4.0, 9.0]])
    mask = tensor([[True, False, True, False]])
    assert F.compute_gae(values, rewards, 0.5, 0.5, mask).tolist() == [[1.5, 0.0, 2.0, 0.0]]
    assert F.compute_gae(tensor([[2.0]]), tensor([[5.0]])).tolist() == [[3.0]]


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0, 0)])
def test_advantages_of_no_token_are_empty(shape):
    values, mask = torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.bool)
    for advantages in (
        F.compute_gae(values, values, mask=mask),
        F.compute_advantages(values, torch.zeros(shape[:1]), mask),
        F.rewards_to_go(values, 1.0, mask),
    ):
        assert advantages.shape == shape and advantages.dtype == torch.float64


def test_compute_returns_matches_hand_computed():
    advantages, values = tensor([[1.5, NAN]]), tensor([[2.0, 7.0]])
    assert F.compute_returns(advantages, values, tensor([[True, False]])).tolist() == [[3.5, 0.0]]
    # one step: A + V is the next value, and the reward at the end
    values, rewards = tensor([[1.0, 3.0, 2.0]]), tensor([10.0])
    returns = F.compute_returns(F.compute_advantages(values, rewards), values)
    assert returns.tolist() == [[3.0, 2.0, 10.0]]


def test_explained_variance_matches_hand_computed():
    returns, mask = tensor([[1.0, 2.0, 3.0, NAN]]), tensor([[True, True, True, False]])
    # Var(R) = 1; errors (0, 1, 0) have variance 1/3
    values = tensor([[1.0, 1.0, 3.0, 5.0]])
    assert F.explained_variance(values, returns, mask).item() == pytest.approx(2 / 3)
    # a constant shift does not matter; a constant explains nothing; -R gives 1 - 4
    assert F.explained_variance(returns + 7, returns, mask).item() == pytest.approx(1.0)
    assert F.explained_variance(torch.full_like(returns, 2.0), returns, mask).item() == 0.0
    assert F.explained_variance(-returns, returns, mask).item() == pytest.approx(-3.0)
    equal = torch.full((1, 7), 0.1)
    assert F.explained_variance(torch.randn(1, 7), equal).item() == 0.0
    assert F.explained_variance(equal[:, :1], equal[:, :1]).item() == 0.0


def test_token_rewards_match_hand_computed():
    no_kl = F.token_rewards(tensor([2.0, -1.0, 5.0]), HOLES)
    # once, at the last real token; torchrl gives rows that stop early the reward twice
    assert no_kl.tolist() == [[0.0, 2.0, 0.0], [0.0, 0.0, -1.0], [0.0, 0.0, 0.0]]
    kl = tensor([[0.5, 1.0, NAN], [2.0, NAN, -1.0], [NAN, NAN, NAN]])
    got = F.token_rewards(tensor([2.0, -1.0, 5.0]), HOLES, kl, 0.1)
    assert got.flatten().tolist() == pytest.approx([-0.05, 1.9, 0, -0.2, 0, -0.9, 0, 0, 0])
    by_token = tensor([[2.0, -1.0, NAN], [5.0, NAN, 0.5], [NAN, NAN, NAN]])
    got = F.token_rewards(by_token, HOLES, kl, 0.1)
    assert got.flatten().tolist() == pytest.approx([1.95, -1.1, 0, 4.8, 0, 0.6, 0, 0, 0])
    with pytest.raises(ValueError, match="kl_per_token is missing"):
        F.token_rewards(tensor([1.0]), tensor([[True]]), kl_coef=0.1)


def test_value_function_loss_matches_hand_computed():
    # 1/2 * 0.15 * (1 + 4) / 2
    values, returns = tensor([[1.0, 2.0, NAN]]), tensor([[2.0, 0.0, INF]])
    loss = F.calc_value_function_loss(values, returns, 0.15, tensor([[True, True, False]]))
    assert loss.item() == pytest.approx(0.1875)
    assert F.calc_value_function_loss(tensor([[3.0]]), tensor([[1.0]]), 1.0).item() == 2.0


def test_clipped_value_function_loss_takes_the_larger_error():
    values, old = tensor([[1.0, 1.0, 0.1]], requires_grad=True), torch.zeros(1, 3)
    loss = F.calc_value_function_loss(
        values, tensor([[1.0, 0.0, 1.0]]), 2.0, old_values=old, clip=0.2
    )
    # clipped at 0.2: (0.2 - 1)^2 > 0; 1 > 0.2^2; not clipped: 0.9^2
    assert loss.item() == pytest.approx((0.64 + 1.0 + 0.81) / 3)
    loss.backward()
    # no gradient where the value moved too far towards its return
    assert values.grad[0].tolist() == pytest.approx([0.0, 2 / 3, -0.6])


def test_value_clip_without_old_values_or_below_zero_raises():
    (x,) = draw(0, "bg")
    with pytest.raises(ValueError, match="old_values is missing"):
        F.calc_value_function_loss(x, x, 1.0, clip=0.2)
    with pytest.raises(ValueError, match=r"clip is -0\.2"):
        F.calc_value_function_loss(x, x, 1.0, old_values=x, clip=-0.2)
