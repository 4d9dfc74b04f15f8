"""The paired permutation test: by hand, against all signs, and how often it is below a level."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_lab.functional import paired_permutation_test


def of(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def exact_p(a, b):
    """The share of all 2^n choices of signs that are as far from 0: another formulation."""
    differences = [x - y for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    total = abs(sum(differences))
    choices = list(itertools.product((1, -1), repeat=len(differences)))
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in choices]
    return sum(found >= total - 1e-9 for found in sums) / len(choices)


def test_by_hand():
    """Differences 1, 2, 3 sum to 6: of eight choices of signs, two reach 6 in absolute size."""
    found = paired_permutation_test(of(1, 2, 3), of(0, 0, 0), draws=40_000)
    assert found == pytest.approx(1 / 4, abs=5 * math.sqrt(3 / 16 / 40_000))
    # 3, -1, -1 sum to 1: +-1 by two choices, +-3 by four, +-5 by two; all eight reach 1
    assert paired_permutation_test(of(3, 0, 0), of(0, 1, 1)) == 1.0


def test_p_is_never_0_and_the_observed_one_counts():
    found = paired_permutation_test(torch.ones(60), torch.zeros(60), draws=199)
    assert found == 1 / 200
    assert paired_permutation_test(of(5.0), of(2.0)) == 1.0
    assert paired_permutation_test(of(1, 2, 3), of(1, 2, 3), draws=100) == 1.0


def test_many_draws_agree_with_all_signs():
    generator = torch.Generator().manual_seed(0)
    for n in (2, 5, 9):
        a, b = (torch.randn(n, generator=generator, dtype=torch.float64) for _ in "ab")
        exact = exact_p(a, b)
        found = paired_permutation_test(a, b, draws=20_000, generator=generator)
        assert found == pytest.approx(exact, abs=5 * math.sqrt(exact * (1 - exact) / 20_000) + 1e-4)


def test_equal_up_to_rounding_reaches():
    """0.1 three times has the mean of its own signs, in whichever order it is added."""
    a = torch.full((30,), 0.1, dtype=torch.float64)
    a[1::2] = 0.3
    assert paired_permutation_test(a, -a[torch.arange(30)], draws=100) == 1 / 101
    tied = of(0.1, 0.2, 0.3)
    assert paired_permutation_test(tied, of(0, 0, 0), 20_000) == pytest.approx(0.25, abs=0.02)


def test_where_nothing_differs_p_is_below_its_level_as_seldom_as_it_says():
    generator = torch.Generator().manual_seed(1)
    pairs = torch.randn(400, 2, 12, generator=generator) + 50 * torch.randn(400, 1, 12)
    found = [paired_permutation_test(a, b, 199, generator) for a, b in pairs]
    for level in (0.05, 0.2):
        below = sum(p <= level for p in found) / 400
        assert below < level + 4 * math.sqrt(level * (1 - level) / 400)
    assert 0.4 < sum(found) / 400 < 0.6


def test_what_the_pairs_share_does_not_matter():
    """The spread over texts is far larger than the effect, and is in both of a pair."""
    generator = torch.Generator().manual_seed(2)
    shared = 100 * torch.randn(20, generator=generator)
    better = shared + 1 + 0.1 * torch.randn(20, generator=generator)
    assert paired_permutation_test(better, shared) == 1 / 2001


values = st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=8)


@given(values, st.integers(0, 10**6))
def test_neither_order_nor_sign_nor_a_factor_changes_it(pairs, seed):
    a, b = (torch.tensor(x, dtype=torch.float64) for x in zip(*pairs, strict=True))
    p = lambda x, y: paired_permutation_test(x, y, 100, torch.Generator().manual_seed(seed))
    found = p(a, b)
    assert 1 / 101 <= found <= 1
    assert p(b, a) == found
    assert p(8 * a, 8 * b) == found


def test_draws_are_the_same_unless_a_generator_is_given():
    a, b = torch.arange(9.0), torch.arange(9.0).flip(0) + 1
    assert paired_permutation_test(a, b) == paired_permutation_test(a, b)
    state = torch.random.get_rng_state()
    generator = torch.Generator().manual_seed(3)
    several = {paired_permutation_test(a, b, 500, generator) for _ in range(4)}
    assert len(several) > 1 and torch.equal(state, torch.random.get_rng_state())


def test_odd_dtypes_extremes_and_history():
    a, b = torch.tensor([3e38, 2e38, 3e38]), torch.tensor([-3e38, 1e38, 2e38])
    assert paired_permutation_test(a, b, 20_000) == pytest.approx(exact_p(a, b), abs=0.02)
    halves = torch.tensor([1.0, 2.0, 4.0], dtype=torch.bfloat16, requires_grad=True)
    found = paired_permutation_test(halves, torch.zeros_like(halves))
    assert type(found) is float and halves.grad is None
    mixed = paired_permutation_test(of(1, 2, 4), torch.zeros(3))
    assert mixed == found


@pytest.mark.parametrize(
    ("a", "b", "draws", "says"),
    [
        ([], [], 200, "and 0 pairs"),
        ([1.0, math.nan], [0.0, 0.0], 200, "2 pairs, 1 of them nan"),
        ([1.0], [0.0], 99, "draws=99"),
    ],
)
def test_what_has_no_p_value_is_refused(a, b, draws, says):
    with pytest.raises(ValueError, match=says):
        paired_permutation_test(torch.tensor(a), torch.tensor(b), draws)


def test_unequal_shapes_are_refused(no_type_checks):
    with pytest.raises(ValueError, match="shape"):
        paired_permutation_test(torch.ones(3), torch.ones(1))
