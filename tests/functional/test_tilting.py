"""Exponential tilting, frontier slopes and best-of-n."""

import itertools
import math
import statistics

import pytest
import torch

from rlhf_lab import functional as F
from tests.functional.calls import draw, seeds


def of(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def kl(p, q):
    return float((torch.special.xlogy(p, p) - torch.special.xlogy(p, q.double())).sum())


def test_tilt_matches_hand_computed():
    # exp(log 3) = 3: 1 to 1 becomes 1 to 3; at twice the beta, 1 to sqrt 3
    even, rewards, root = of(0.5, 0.5), of(0.0, math.log(3)), math.sqrt(3)
    assert F.tilt(even, rewards, 1.0).tolist() == pytest.approx([0.25, 0.75])
    assert F.tilt(even, rewards, 2.0).tolist() == pytest.approx([1 / (1 + root), root / (1 + root)])
    rows = F.tilt(torch.stack([even, of(0.9, 0.1)]), torch.stack([rewards, of(7.0, 7.0)]), 1.0)
    assert rows.flatten().tolist() == pytest.approx([0.25, 0.75, 0.9, 0.1])
    assert F.tilt(torch.tensor([0.5, 0.5]), torch.tensor([3e38, -3e38]), 1e-6).tolist() == [
        1.0,
        0.0,
    ]
    # an impossible outcome stays impossible
    for reward in (1e300, math.inf, math.nan):
        assert F.tilt(of(0.5, 0.5, 0.0), of(1, 1, reward), 1e-3).tolist() == [0.5, 0.5, 0.0]


def test_tilt_has_a_finite_gradient_at_probability_zero():
    probs = of(0.4, 0.6, 0.0)
    rewards = of(0.1, -0.4, 0.9).requires_grad_()
    assert torch.autograd.gradcheck(lambda r: F.tilt(probs, r, 0.7), (rewards,))


@pytest.mark.parametrize("beta", [0.0, -1.0, math.nan])
def test_tilt_raises_on_bad_arguments(beta):
    with pytest.raises(ValueError, match="beta must be greater than 0"):
        F.tilt(of(1.0), of(1.0), beta)
    for chances in (of(0.0, 0.0), of(1.2, -0.2)):
        with pytest.raises(ValueError, match="a negative entry or a row of zeros"):
            F.tilt(chances, of(1.0, 1.0), 1.0)


def test_tilt_slopes_match_hand_computed():
    # a fair coin with rewards 0 and 1 has variance 1/4; covariance -1/2
    slopes = F.tilt_slopes(of(0.5, 0.5), of(0.0, 1.0), of(2.0, 0.0))
    assert slopes == pytest.approx((0.25, -0.5))
    # mean 3: 1/4 * 9 + 3/4 * 1, and 1/4 * -3 * 1
    slopes = F.tilt_slopes(of(0.25, 0.75), of(0.0, 4.0), of(1.0, 0.0))
    assert slopes == pytest.approx((3.0, -0.75))
    assert F.tilt_slopes(of(1.0), of(3.0), of(4.0)) == (0.0, 0.0)
    with pytest.raises(ValueError, match=r"probs must sum to 1.*0\.5"):
        F.tilt_slopes(of(0.25, 0.25), of(0.0, 1.0), of(0.0, 1.0))


def test_excess_kl_matches_hand_computed():
    # half-way between rewards 0.5 and 0.9 the frontier is at 0.3 nats; in any order of points
    for rewards, nats in (((0.5, 0.9, 1.0), (0.0, 0.6, 2.0)), ((1.0, 0.5, 0.9), (2.0, 0.0, 0.6))):
        found = [F.excess_kl(r, 1.0, of(*rewards), of(*nats)) for r in (0.5, 0.7, 0.9, 0.95, 1.0)]
        assert found == pytest.approx([1.0, 0.7, 0.4, -0.3, -1.0])
    for reward in (0.49, 1.01, math.nan):
        assert math.isnan(F.excess_kl(reward, 1.0, of(0.5, 1.0), of(0.0, 1.0)))
    assert F.excess_kl(0.5, 1.0, of(0.5, 0.5), of(0.25, 0.5)) == 0.75
    halves = torch.tensor([0.5, 1.0]).half()
    assert F.excess_kl(0.75, 1.0, halves, halves) == pytest.approx(0.25)
    with pytest.raises(ValueError, match="at least 2 points, got 1"):
        F.excess_kl(0.5, 1.0, of(0.5), of(0.0))


def test_best_of_n_matches_hand_computed():
    # of 1, 2, 4 the best of two is 2 once and 4 twice
    rewards = torch.tensor([[4.0, 1.0, 2.0]])
    assert F.best_of_n_weights(rewards, 2)[0].tolist() == pytest.approx([2 / 3, 0.0, 1 / 3])
    means = [F.best_of_n_mean(rewards, rewards, n).item() for n in (1, 2, 3)]
    assert means == pytest.approx([7 / 3, 10 / 3, 4.0])
    values = torch.tensor([[0.0, 9.0, 3.0]])
    assert F.best_of_n_mean(rewards, values, 2).item() == pytest.approx(1.0)
    # equal rewards share
    tied = F.best_of_n_weights(torch.tensor([[1.0, 1.0, 0.0]]), 2)
    assert tied[0].tolist() == pytest.approx([0.5, 0.5, 0.0])
    assert F.best_of_n_weights(torch.zeros(1, 1).half(), 1).tolist() == [[1.0]]
    for n in (0, 5):
        with pytest.raises(ValueError, match=f"n must be between 1 and 4 .*got {n}"):
            F.best_of_n_weights(torch.zeros(1, 4), n)
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        F.best_of_n_distribution(of(0.5, 0.5), of(1.0, 0.0), 0)


@pytest.mark.parametrize("n", [1, 2, 4, 6])
@seeds(15)
def test_best_of_n_mean_is_the_mean_over_all_subsets(n, seed):
    rewards = torch.randint(4, (6,), generator=torch.Generator().manual_seed(seed)).tolist()
    values = draw(seed, "w")[0][:6].tolist()
    best = []
    for chosen in itertools.combinations(range(6), n):
        top = max(rewards[i] for i in chosen)
        best.append(statistics.mean(values[i] for i in chosen if rewards[i] == top))
    got = F.best_of_n_mean(of(rewards), of(values), n)
    assert got.item() == pytest.approx(statistics.mean(best), abs=1e-9)


def test_best_of_n_of_many_samples_is_exact():
    rewards, ranks = torch.linspace(-1e38, 1e38, 4096)[None], torch.arange(4096.0)[None]
    assert F.best_of_n_mean(rewards, ranks, 4096).item() == pytest.approx(4095.0)
    assert F.best_of_n_mean(rewards, ranks, 1).item() == pytest.approx(2047.5, rel=1e-9)
    assert F.best_of_n_weights(rewards, 100).sum().item() == pytest.approx(1.0, abs=1e-9)


def test_best_of_n_distribution_and_bound_match_hand_computed():
    # a fair coin: heads in 3 of 4
    best = F.best_of_n_distribution(of(0.5, 0.5), of(1.0, 0.0), 2)
    assert best.tolist() == pytest.approx([0.75, 0.25])
    # equal rewards keep their proportions, impossible outcomes stay impossible; from counts
    best = F.best_of_n_distribution(of(1.0, 3.0, 6.0, 0.0), of(1.0, 1.0, 0.0, 2.0), 3)
    assert best.tolist() == pytest.approx([0.784 / 4, 0.784 * 3 / 4, 0.216, 0.0])
    bounds = [F.best_of_n_kl_bound(n) for n in (1, 2, 4)]
    assert bounds == pytest.approx([0.0, math.log(2) - 0.5, math.log(4) - 0.75])
    # reached if no two samples have the same reward
    many = torch.full((20_000,), 1 / 20_000).double()
    best = F.best_of_n_distribution(many, torch.arange(20_000.0), 8)
    assert kl(best, many) == pytest.approx(F.best_of_n_kl_bound(8), abs=1e-3)
