"""Exponential tilting: by hand, against a search over all distributions, and its slopes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_lab.functional import excess_kl, tilt, tilt_slopes


def of(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_by_hand():
    """exp(log 3) is 3: chances 1 to 1 become 1 to 3; at twice the price, 1 to the root of 3."""
    even, rewards = of(0.5, 0.5), of(0.0, math.log(3))
    assert tilt(even, rewards, 1.0).tolist() == pytest.approx([0.25, 0.75])
    root = math.sqrt(3)
    assert tilt(even, rewards, 2.0).tolist() == pytest.approx([1 / (1 + root), root / (1 + root)])
    assert tilt(of(0.2, 0.3, 0.5), of(7.0, 7.0, 7.0), 0.1).tolist() == pytest.approx(
        [0.2, 0.3, 0.5]
    )


def test_what_cannot_happen_never_does_whatever_it_would_pay():
    for reward in (1e300, math.inf, math.nan):
        assert tilt(of(0.5, 0.5, 0.0), of(1.0, 1.0, reward), 1e-3).tolist() == [0.5, 0.5, 0.0]


def test_extremes_and_half_precision():
    far = torch.tensor([3e38, -3e38])
    assert tilt(torch.tensor([0.5, 0.5]), far, 1e-6).tolist() == [1.0, 0.0]
    assert tilt(torch.tensor([1.0]), torch.tensor([-5.0]), 0.1).tolist() == [1.0]
    halves = torch.tensor([0.5, 0.5], dtype=torch.bfloat16)
    assert tilt(halves, halves, 1.0).dtype == torch.float32


def test_rows_are_tilted_each_by_itself():
    chances = torch.tensor([[0.5, 0.5], [0.9, 0.1]])
    rewards = torch.tensor([[0.0, 1.0], [5.0, 6.0]])
    rows = [tilt(c, r, 0.5) for c, r in zip(chances, rewards, strict=True)]
    assert torch.allclose(tilt(chances, rewards, 0.5), torch.stack(rows))


numbers = st.lists(st.tuples(st.floats(0.05, 1), st.floats(-3, 3)), min_size=2, max_size=5)


@given(numbers, st.floats(0.1, 5), st.integers(0, 10**6))
def test_no_other_distribution_is_better_at_this_price(pairs, beta, seed):
    """E r - beta KL is beta log Z at the optimum, and lower by beta KL(pi || pi*) elsewhere."""
    chances, rewards = (torch.tensor(x, dtype=torch.float64) for x in zip(*pairs, strict=True))
    chances = chances / chances.sum()
    worth = lambda p: (p @ rewards - beta * (p * (p / chances).log()).sum()).item()
    best = tilt(chances, rewards, beta)
    log_z = math.log((chances * (rewards / beta).exp()).sum().item())
    assert worth(best) == pytest.approx(beta * log_z, abs=1e-9)
    generator = torch.Generator().manual_seed(seed)
    other = torch.rand(len(pairs), generator=generator, dtype=torch.float64) + 1e-3
    other = other / other.sum()
    lost = beta * (other * (other / best).log()).sum().item()
    assert worth(other) == pytest.approx(worth(best) - lost, abs=1e-9)


def test_gradients_are_those_of_finite_differences():
    chances, rewards = (x.requires_grad_() for x in (of(0.2, 0.3, 0.5), of(0.1, -0.4, 0.9)))
    assert torch.autograd.gradcheck(lambda c, r: tilt(c, r, 0.7), (chances, rewards))
    with_hole = of(0.4, 0.6, 0.0)
    assert torch.autograd.gradcheck(lambda r: tilt(with_hole, r, 0.7), (rewards,))


def test_tilt_raises_on_a_row_of_zeros():
    with pytest.raises(ValueError, match="no positive entry"):
        tilt(torch.zeros(3), torch.ones(3), 1.0)


@pytest.mark.parametrize("beta", [0.0, -1.0, math.nan])
def test_a_price_that_is_none_is_refused(beta):
    with pytest.raises(ValueError, match="beta must be greater than 0"):
        tilt(of(1.0), of(1.0), beta)


def test_unequal_shapes_are_refused(no_type_checks):
    with pytest.raises(ValueError, match="shape"):
        tilt(of(0.5, 0.5)[None], of(1.0, 2.0), 1.0)


def test_slopes_by_hand():
    """A fair coin that pays 1 has variance 1/4; what falls when it pays has covariance -1/2."""
    assert tilt_slopes(of(0.5, 0.5), of(0.0, 1.0), of(2.0, 0.0)) == pytest.approx((0.25, -0.5))
    assert tilt_slopes(of(1.0), of(3.0), of(4.0)) == (0.0, 0.0)


@given(numbers, st.floats(0.2, 3))
def test_slopes_are_those_of_a_further_tilt(pairs, at):
    chances, rewards = (torch.tensor(x, dtype=torch.float64) for x in zip(*pairs, strict=True))
    chances, measured = chances / chances.sum(), rewards.cos()
    mean = lambda lam, score: (tilt(chances, rewards, 1 / lam) @ score).item()
    found = tilt_slopes(tilt(chances, rewards, 1 / at), rewards, measured)
    for slope, score in zip(found, (rewards, measured), strict=True):
        ahead, behind = mean(at + 1e-5, score), mean(at - 1e-5, score)
        assert slope == pytest.approx((ahead - behind) / 2e-5, abs=1e-6)
    assert found[0] >= 0


def test_chances_that_are_no_distribution_have_no_slopes():
    with pytest.raises(ValueError, match=r"probs must sum to 1.*0\.5"):
        tilt_slopes(of(0.25, 0.25), of(0.0, 1.0), of(0.0, 1.0))


def test_excess_by_hand():
    """Half-way between rewards 0.5 and 0.9 the frontier spends 0.3 nats; 1 was spent."""
    rewards, nats = of(0.5, 0.9, 1.0), of(0.0, 0.6, 2.0)
    assert excess_kl(0.7, 1.0, rewards, nats) == pytest.approx(0.7)
    assert excess_kl(0.9, 0.6, rewards, nats) == pytest.approx(0.0)
    assert excess_kl(0.95, 1.0, rewards, nats) == pytest.approx(-0.3)
    ends = [excess_kl(reward, 1.0, rewards, nats) for reward in (0.5, 1.0)]
    assert ends == pytest.approx([1.0, -1.0])


def test_the_order_of_the_points_does_not_matter():
    rewards, nats = of(1.0, 0.5, 0.9), of(2.0, 0.0, 0.6)
    assert excess_kl(0.7, 1.0, rewards, nats) == pytest.approx(0.7)


@pytest.mark.parametrize("reward", [0.49, 1.01, math.nan])
def test_a_reward_off_the_frontier_has_no_excess(reward):
    assert math.isnan(excess_kl(reward, 1.0, of(0.5, 1.0), of(0.0, 1.0)))


def test_points_of_one_reward_and_half_precision():
    assert excess_kl(0.5, 1.0, of(0.5, 0.5), of(0.25, 0.5)) == 0.75
    halves = torch.tensor([0.5, 1.0]).half()
    assert excess_kl(0.75, 1.0, halves, halves) == pytest.approx(0.25)


@given(numbers, st.floats(0.001, 0.999), st.floats(0, 5), st.randoms())
def test_excess_is_that_of_numpys_interpolation(pairs, at, kl, random):
    nats = sorted(x for x, _ in pairs)
    rewards = sorted(y for _, y in pairs)
    rewards = [reward + 0.01 * i for i, reward in enumerate(rewards)]
    reward = rewards[0] + at * (rewards[-1] - rewards[0])
    order = random.sample(range(len(pairs)), len(pairs))
    found = excess_kl(reward, kl, of(*(rewards[i] for i in order)), of(*(nats[i] for i in order)))
    assert found == pytest.approx(kl - np.interp(reward, rewards, nats), abs=1e-9)


def test_the_optimum_itself_spends_no_nat_too_many():
    """A policy on the frontier has an excess of 0, up to the straight lines between its points."""
    chances, rewards = of(0.4, 0.3, 0.2, 0.1), of(0.0, 0.5, 0.8, 1.0)
    policies = [tilt(chances, rewards, beta) for beta in np.geomspace(0.05, 5, 400)]
    earned = torch.stack([p @ rewards for p in policies])
    nats = torch.stack([(p * (p / chances).log()).sum() for p in policies])
    best = tilt(chances, rewards, 0.37)
    kl = (best * (best / chances).log()).sum().item()
    assert excess_kl((best @ rewards).item(), kl, earned, nats) == pytest.approx(0, abs=1e-4)


def test_a_frontier_of_one_point_is_refused():
    with pytest.raises(ValueError, match="at least 2 points, got 1"):
        excess_kl(0.5, 1.0, of(0.5), of(0.0))
