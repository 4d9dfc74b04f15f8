"""Best-of-n: the estimate over all subsets, the bound on the KL, and the exact KL."""

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_lab.functional import (
    best_of_n_distribution,
    best_of_n_kl_bound,
    best_of_n_mean,
    best_of_n_weights,
)


def by_all_subsets(rewards, values, n):
    """The mean value of the best of every n samples; of several best ones, their mean."""
    found = []
    for chosen in itertools.combinations(range(len(rewards)), n):
        most = max(rewards[i] for i in chosen)
        found.append(statistics.mean(values[i] for i in chosen if rewards[i] == most))
    return statistics.mean(found)


def test_by_hand():
    """Of 1, 2, 4 the best of two is 2 once and 4 twice; of three it is 4."""
    rewards = torch.tensor([[4.0, 1.0, 2.0]])
    assert best_of_n_weights(rewards, 2)[0].tolist() == pytest.approx([2 / 3, 0.0, 1 / 3])
    assert best_of_n_mean(rewards, rewards, 2).tolist() == pytest.approx([10 / 3])
    assert best_of_n_mean(rewards, rewards, 1).tolist() == pytest.approx([7 / 3])
    assert best_of_n_mean(rewards, rewards, 3).tolist() == pytest.approx([4.0])
    true_reward = torch.tensor([[0.0, 9.0, 3.0]])
    assert best_of_n_mean(rewards, true_reward, 2).tolist() == pytest.approx([1.0])


def test_equal_rewards_share_what_they_win():
    """Two best of three: each wins half of what the pair wins, which is always."""
    rewards = torch.tensor([[1.0, 1.0, 0.0]])
    assert best_of_n_weights(rewards, 2)[0].tolist() == pytest.approx([0.5, 0.5, 0.0])
    assert best_of_n_weights(torch.zeros(1, 4), 3)[0].tolist() == pytest.approx([0.25] * 4)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5)), min_size=1, max_size=7), st.data())
def test_it_is_the_mean_over_all_ways_to_draw(pairs, data):
    n = data.draw(st.integers(1, len(pairs)))
    rewards, values = [float(r) for r, _ in pairs], [v for _, v in pairs]
    found = best_of_n_mean(torch.tensor([rewards]), torch.tensor([values], dtype=torch.float64), n)
    assert found.item() == pytest.approx(by_all_subsets(rewards, values, n), abs=1e-9)


def test_many_samples_and_extremes_stay_exact():
    """The best of all is the maximum; of one, the mean; infinite factorials are not met."""
    rewards = torch.linspace(-1e38, 1e38, 4096)[None]
    ranks = torch.arange(4096.0)[None]
    assert best_of_n_mean(rewards, ranks, 4096).item() == pytest.approx(4095.0)
    assert best_of_n_mean(rewards, ranks, 1).item() == pytest.approx(2047.5, rel=1e-9)
    assert best_of_n_weights(rewards, 100).sum().item() == pytest.approx(1.0, abs=1e-9)
    assert best_of_n_weights(torch.zeros(1, 1).half(), 1).tolist() == [[1.0]]
    for n in (0, 5):
        with pytest.raises(ValueError, match=f"n must be between 1 and 4 .*got {n}"):
            best_of_n_weights(torch.zeros(1, 4), n)


def test_the_bound_by_hand():
    assert best_of_n_kl_bound(1) == 0.0
    assert best_of_n_kl_bound(2) == pytest.approx(math.log(2) - 0.5)
    assert best_of_n_kl_bound(4) == pytest.approx(math.log(4) - 0.75)
    with pytest.raises(ValueError, match="n must .*got 0"):
        best_of_n_kl_bound(0)


def kl(best, chances):
    return float(
        (torch.special.xlogy(best, best) - torch.special.xlogy(best, chances.double())).sum()
    )


def test_the_exact_distribution_by_hand():
    """A fair coin, heads better: the best of 2 is heads in 3 of 4; KL = log 2 - H(1/4)."""
    chances, rewards = torch.tensor([0.5, 0.5]).double(), torch.tensor([1.0, 0.0])
    best = best_of_n_distribution(chances, rewards, 2)
    assert best.tolist() == pytest.approx([0.75, 0.25])
    entropy = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    assert kl(best, chances) == pytest.approx(math.log(2) - entropy)
    with pytest.raises(ValueError, match="n must .*got 0"):
        best_of_n_distribution(chances, rewards, 0)


def test_equal_rewards_keep_their_proportions_and_impossible_outcomes_stay_so():
    chances = torch.tensor([0.1, 0.3, 0.6, 0.0]).double()
    best = best_of_n_distribution(chances, torch.tensor([1.0, 1.0, 0.0, 2.0]), 3)
    assert best.tolist() == pytest.approx([0.784 / 4, 0.784 * 3 / 4, 0.216, 0.0])
    same = best_of_n_distribution(chances, torch.zeros(4), 9)
    torch.testing.assert_close(same, chances)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 5), st.data())
def test_it_is_what_drawing_all_tuples_gives_and_its_kl_is_within_the_bound(parts, n, data):
    chances = torch.tensor(parts).double() / sum(parts)
    rewards = [float(data.draw(st.integers(0, 2))) for _ in parts]
    expected = [0.0] * len(parts)
    for drawn in itertools.product(range(len(parts)), repeat=n):
        most = max(rewards[i] for i in drawn)
        winners = [i for i in drawn if rewards[i] == most]
        for i in winners:
            chance = math.prod(chances[j].item() for j in drawn)
            expected[i] += chance / len(winners)
    best = best_of_n_distribution(chances, torch.tensor(rewards), n)
    assert best.tolist() == pytest.approx(expected, abs=1e-9)
    assert kl(best, chances) <= best_of_n_kl_bound(n) + 1e-9


def test_the_bound_is_reached_where_no_two_samples_earn_the_same():
    chances = torch.full((20_000,), 1 / 20_000).double()
    best = best_of_n_distribution(chances, torch.arange(20_000.0), 8)
    assert kl(best, chances) == pytest.approx(best_of_n_kl_bound(8), abs=1e-3)
