"""The paired permutation test, and Student's t interval over seeds."""

import math

import pytest
import torch

from rlhf_lab import functional as F

# two-sided, Fisher and Yates
TABLE = {(0.95, 1): 12.706, (0.95, 2): 4.303, (0.95, 3): 3.182, (0.95, 4): 2.776, (0.95, 9): 2.262}
TABLE |= {(0.95, 30): 2.042, (0.9, 2): 2.920, (0.99, 4): 4.604, (0.99, 10): 3.169, (0.5, 1): 1.0}
TABLE |= {(0.95, 100_000): 1.960}


def of(*numbers, dtype=torch.float64):
    return torch.tensor(numbers, dtype=dtype)


def test_permutation_test_matches_hand_computed():
    # 1 + 2 + 3 = 6: of eight choices of signs, two reach 6 in absolute size
    p = F.paired_permutation_test(of(1, 2, 3), of(0, 0, 0), draws=40_000)
    assert p == pytest.approx(1 / 4, abs=5 * math.sqrt(3 / 16 / 40_000))
    # 3, -1, -1 sum to 1, which all eight choices reach
    assert F.paired_permutation_test(of(3, 0, 0), of(0, 1, 1)) == 1.0
    # the observed draw counts, so p is never 0
    assert F.paired_permutation_test(torch.ones(60), torch.zeros(60), draws=199) == 1 / 200
    assert F.paired_permutation_test(of(5.0), of(2.0)) == 1.0
    # a mean equal up to rounding reaches: 0.3 - 0.2 - 0.1 and the like
    tied = F.paired_permutation_test(of(0.1, 0.2, 0.3), of(0, 0, 0), 20_000)
    assert tied == pytest.approx(0.25, abs=0.02)


def test_permutation_test_draws_the_same_without_a_generator():
    a, b = torch.arange(9.0, requires_grad=True), torch.arange(9.0).flip(0) + 1
    assert F.paired_permutation_test(a, b) == F.paired_permutation_test(a.bfloat16(), b.bfloat16())
    state, generator = torch.random.get_rng_state(), torch.Generator().manual_seed(3)
    assert len({F.paired_permutation_test(a, b, 500, generator) for _ in range(4)}) > 1
    assert torch.equal(state, torch.random.get_rng_state())
    big, small = torch.tensor([3e38, 2e38, 3e38]), torch.tensor([-3e38, 1e38, 2e38])
    # 6, 1 and 1: two of eight choices of signs reach 8
    assert F.paired_permutation_test(big, small, 20_000) == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(
    ("a", "b", "draws", "message"),
    [
        ([], [], 200, "and 0 pairs"),
        ([1.0, math.nan], [0.0, 0.0], 200, "2 pairs, 1 of them nan"),
        ([1.0], [0.0], 99, "draws=99"),
    ],
)
def test_permutation_test_raises_on_bad_arguments(a, b, draws, message):
    with pytest.raises(ValueError, match=message):
        F.paired_permutation_test(torch.tensor(a), torch.tensor(b), draws)


def test_seed_interval_matches_hand_computed():
    """Differences 1, 2, 3: mean 2, standard deviation 1, half-width 4.3027 / sqrt 3 = 2.4841."""
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        found = F.seed_interval(of(1, 3, 5, dtype=dtype).requires_grad_(), of(0, 1, 2, dtype=dtype))
        assert found.value == 2 and found.n == 3 and found.level == 0.95
        assert (2 - found.low.item(), found.high.item() - 2) == pytest.approx(
            (2.4841,) * 2, abs=1e-4
        )
        assert found.value.dtype == torch.float64 and not found.value.requires_grad
    alone = F.seed_interval(of(3.0), of(1.0))
    assert (alone.value.item(), alone.low, alone.high, alone.why) == (2, None, None, "one seed")
    equal = F.seed_interval(of(1, 1, 1), of(0, 0, 0))
    assert equal.low.item() == equal.high.item() == 1
    extreme = F.seed_interval(of(3e38, -3e38, dtype=torch.float32), torch.full((2,), -3e38))
    assert extreme.high.isfinite()


@pytest.mark.slow
@pytest.mark.parametrize(("level", "degrees"), TABLE)
def test_t_two_sided_matches_the_tables(level, degrees):
    assert F.t_two_sided(level, degrees) == pytest.approx(TABLE[level, degrees], abs=6e-4)


@pytest.mark.parametrize(
    ("treated", "level", "message"),
    [
        ([], 0.95, "at least one seed"),
        ([1.0, math.nan], 0.95, "must be finite"),
        ([1.0, 2.0], 95.0, "level=95"),
    ],
)
def test_seed_interval_raises_on_bad_arguments(treated, level, message):
    with pytest.raises(ValueError, match=message):
        F.seed_interval(of(*treated), torch.zeros(len(treated)), level)
    with pytest.raises(ValueError, match="degrees=0"):
        F.t_two_sided(0.95, 0)
