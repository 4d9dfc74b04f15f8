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
    assert F.pass_at_k_estimate(torch.tensor([]).long(), 4, 2).tolist() == []
    many = F.pass_at_k_estimate(torch.tensor([10]), 100_000, 5000).item()
    assert many == pytest.approx(1 - 0.95**10, abs=1e-3)


@pytest.mark.parametrize("n, k", [(1, 1), (4, 3), (4, 4), (5, 2), (6, 3), (8, 1), (8, 8)])
def test_estimate_is_the_fraction_of_subsets(n, k):
    drawn = [list(itertools.combinations([1] * c + [0] * (n - c), k)) for c in range(n + 1)]
    found = F.pass_at_k_estimate(torch.arange(n + 1), n, k)
    assert found.tolist() == pytest.approx([sum(map(any, x)) / len(x) for x in drawn])
    for p in (0.003, 0.3, 0.9):  # without bias
        law = of(*(math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)))
        assert (law @ found).item() == pytest.approx(F.pass_at_k(of(p), k).item(), rel=1e-10)


def test_informative_fraction_matches_hand_computed():
    # pairs of a fair coin differ half the time; one response has nothing to differ from
    assert F.informative_fraction(of(0.0, 0.5, 1.0), 2).tolist() == pytest.approx([0, 0.5, 0])
    assert F.informative_fraction(of(0.2, 0.7), 1).tolist() == pytest.approx([0, 0], abs=1e-15)
    assert F.informative_fraction(of(0.003), 8).item() == pytest.approx(8 * 0.003, rel=0.02)


def test_informative_fraction_is_the_mean_of_informative_groups():
    rewards = torch.tensor([*itertools.product([0.0, 1.0], repeat=3)])
    weight = torch.where(rewards == 1, 0.3, 0.7).prod(1)
    group = torch.arange(8).repeat_interleave(3)
    marked = F.informative_groups(rewards.flatten(), group).view(8, 3)[:, 0]
    expected = weight[marked].sum().item()
    assert F.informative_fraction(of(0.3), 3).item() == pytest.approx(expected, rel=1e-6)


def test_bad_arguments_raise(no_type_checks):
    for function in (F.pass_at_k, F.informative_fraction):
        for p in (-0.1, 1.1, math.nan):
            with pytest.raises(ValueError, match="p must be between 0 and 1"):
                function(of(p), 2)
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            function(of(0.5), 0)
    for c, k, name in ((1, 0, "k"), (1, 5, "k"), *((c, 2, "n_right") for c in (-1, 0.5, 5))):
        with pytest.raises(ValueError, match=f"^{name} must be .* n_samples=4, got"):
            F.pass_at_k_estimate(torch.tensor([c]), 4, k)
