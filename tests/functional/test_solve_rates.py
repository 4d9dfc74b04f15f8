"""pass@k, its unbiased estimate, and groups with a signal."""

import itertools
import math

import pytest
import torch

from rlhf_lab import functional as F


def of(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_pass_at_k_matches_hand_computed():
    # two fair coins miss with 1/4; certain and impossible problems do not depend on k
    assert F.pass_at_k(of(0.0, 0.5, 0.9, 1.0), 2).tolist() == pytest.approx([0, 0.75, 0.99, 1])
    assert F.pass_at_k(of(0.0, 0.3, 1.0), 1).tolist() == pytest.approx([0, 0.3, 1], abs=1e-15)
    # far below the resolution of 1 - p: k p
    assert F.pass_at_k(of(1e-20), 1000).item() == pytest.approx(1e-17, rel=1e-12, abs=0)
    assert F.pass_at_k(torch.tensor([0.5], requires_grad=True), 3).requires_grad is False
    assert F.pass_at_k(torch.tensor([0.5]).half(), 2).dtype == torch.float64
    assert F.pass_at_k(torch.zeros(0), 2).tolist() == []


def test_estimate_matches_hand_computed():
    # of 4 responses with 2 right, one of the 6 pairs has none: 5/6, and not 1 - 1/4
    assert F.pass_at_k_estimate(torch.tensor([2]), 4, 2).item() == pytest.approx(5 / 6)
    every = F.pass_at_k_estimate(torch.tensor([0, 1, 2, 3, 4]), 4, 3).tolist()
    assert every == [0.0, 0.75, 1.0, 1.0, 1.0]
    assert F.pass_at_k_estimate(torch.tensor([0, 1, 4]), 4, 1).tolist() == [0.0, 0.25, 1.0]
    assert F.pass_at_k_estimate(torch.tensor([0, 1]), 4, 4).tolist() == [0.0, 1.0]
    assert F.pass_at_k_estimate(torch.tensor([]).long(), 4, 2).tolist() == []


def test_estimate_is_the_fraction_of_subsets():
    for n, k in ((5, 2), (6, 3), (7, 7)):
        for c in range(n + 1):
            drawn = list(itertools.combinations([True] * c + [False] * (n - c), k))
            expected = sum(map(any, drawn)) / len(drawn)
            assert F.pass_at_k_estimate(torch.tensor([c]), n, k).item() == pytest.approx(expected)


@pytest.mark.parametrize("p", [0.003, 0.3, 0.9])
def test_estimate_is_unbiased(p):
    n, counts = 8, torch.arange(9)
    weight = of(*(math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)))
    for k in (1, 3, 8):
        mean = weight @ F.pass_at_k_estimate(counts, n, k)
        assert mean.item() == pytest.approx(F.pass_at_k(of(p), k).item(), rel=1e-10)


def test_estimate_grows_with_k_and_is_stable_for_many_samples():
    by_k = [F.pass_at_k_estimate(torch.tensor([3]), 20, k).item() for k in range(1, 21)]
    assert by_k == sorted(by_k) and by_k[17:] == [1.0] * 3
    many = F.pass_at_k_estimate(torch.tensor([10]), 100_000, 5000).item()
    assert many == pytest.approx(1 - 0.95**10, abs=1e-3)


def test_informative_fraction_matches_hand_computed():
    # pairs of a fair coin differ half the time; one response has nothing to differ from
    assert F.informative_fraction(of(0.0, 0.5, 1.0), 2).tolist() == pytest.approx([0, 0.5, 0])
    assert F.informative_fraction(of(0.2, 0.7), 1).tolist() == pytest.approx([0, 0], abs=1e-15)
    outcomes = itertools.product([0.3, 0.7], repeat=4)
    expected = 1 - sum(math.prod(x) for x in outcomes if len(set(x)) == 1)
    assert F.informative_fraction(of(0.3), 4).item() == pytest.approx(expected)
    assert F.informative_fraction(of(0.003), 8).item() == pytest.approx(8 * 0.003, rel=0.02)


def test_informative_fraction_is_the_mean_of_informative_groups():
    rewards = torch.tensor([*itertools.product([0.0, 1.0], repeat=3)])
    weight = torch.where(rewards == 1, 0.3, 0.7).prod(1)
    group = torch.arange(8).repeat_interleave(3)
    marked = F.informative_groups(rewards.flatten(), group).view(8, 3)[:, 0]
    expected = weight[marked].sum().item()
    assert F.informative_fraction(of(0.3), 3).item() == pytest.approx(expected, rel=1e-6)


def test_bad_arguments_raise():
    for p in (-0.1, 1.1, math.nan):
        for function in (F.pass_at_k, F.informative_fraction):
            with pytest.raises(ValueError, match="p must be between 0 and 1"):
                function(of(p), 2)
            with pytest.raises(ValueError, match="must be at least 1, got 0"):
                function(of(0.5), 0)
    for k in (0, 5):
        with pytest.raises(ValueError, match=f"k must be between 1 and n_samples=4, got {k}"):
            F.pass_at_k_estimate(torch.tensor([1]), 4, k)
    for c in (-1, 5):
        with pytest.raises(ValueError, match="n_right must be between 0 and n_samples=4"):
            F.pass_at_k_estimate(torch.tensor([c]), 4, 2)
