"""The interval over seeds: by hand, against a table of Student's t, and how often it is right."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_lab.functional import seed_interval, t_two_sided

TABLE = {(0.95, 1): 12.706, (0.95, 2): 4.303, (0.95, 3): 3.182, (0.95, 4): 2.776, (0.95, 9): 2.262}
TABLE |= {(0.95, 30): 2.042, (0.9, 2): 2.920, (0.99, 4): 4.604, (0.99, 10): 3.169, (0.5, 1): 1.0}
"""Fisher and Yates, two-sided."""


def of(*numbers, dtype=torch.float64):
    return torch.tensor(numbers, dtype=dtype)


def density(t: float, degrees: int) -> float:
    """Student's density, from its gamma functions: another formulation."""
    log = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
    power = (1 + t * t / degrees) ** (-(degrees + 1) / 2)
    return math.exp(log) / math.sqrt(degrees * math.pi) * power


def test_by_hand():
    """Differences 1, 2, 3: mean 2, standard deviation 1, half-width 4.3027 / sqrt 3 = 2.4841."""
    found = seed_interval(of(1, 3, 5), of(0, 1, 2))
    assert found.value.item() == 2 and found.n == 3 and found.level == 0.95
    assert found.high.item() - 2 == pytest.approx(2.4841, abs=1e-4)
    assert 2 - found.low.item() == pytest.approx(2.4841, abs=1e-4)


@pytest.mark.parametrize(("asked", "t"), TABLE.items())
def test_the_factor_is_that_of_the_tables(asked, t):
    assert t_two_sided(*asked) == pytest.approx(t, abs=6e-4)


@given(degrees=st.integers(1, 40), level=st.floats(0.05, 0.99))
def test_the_density_between_the_factors_adds_up_to_the_level(degrees, level):
    t = t_two_sided(level, degrees)
    steps = 2000
    middles = [(i + 0.5) / steps * t for i in range(steps)]
    assert 2 * sum(density(x, degrees) for x in middles) * t / steps == pytest.approx(
        level, abs=2e-3
    )


def test_of_many_degrees_it_is_normal():
    assert t_two_sided(0.95, 100_000) == pytest.approx(1.95996, abs=1e-4)


def test_it_holds_the_truth_as_often_as_it_says():
    draws = torch.randn(1500, 3, generator=torch.Generator().manual_seed(1))
    found = [seed_interval(row, torch.zeros(3)) for row in draws]
    held = sum(x.low.item() <= 0 <= x.high.item() for x in found) / len(found)
    assert held == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / len(found)))


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=6), st.floats(-1000, 1000))
def test_what_a_pair_has_in_common_drops_out_and_sides_swap(numbers, common):
    a, b = of(*numbers), of(*numbers[::-1])
    one, shifted, swapped = (
        seed_interval(a, b),
        seed_interval(a + common, b + common),
        seed_interval(b, a),
    )
    assert one.low.item() == pytest.approx(shifted.low.item(), abs=1e-6)
    assert one.low.item() == pytest.approx(-swapped.high.item(), abs=1e-9)


def test_one_seed_and_equal_differences():
    alone = seed_interval(of(3.0), of(1.0))
    assert (alone.value.item(), alone.low, alone.high, alone.why) == (2, None, None, "one seed")
    equal = seed_interval(of(1, 1, 1), of(0, 0, 0))
    assert equal.low.item() == equal.high.item() == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_dtypes_and_large_numbers_are_taken_in_float64(dtype):
    found = seed_interval(of(1, 3, 5, dtype=dtype), of(0, 1, 2, dtype=dtype))
    assert found.value.dtype == torch.float64 and found.value.item() == 2
    large = seed_interval(of(3e38, -3e38, 3e38, dtype=torch.float32), torch.full((3,), -3e38))
    assert large.high.isfinite()


def test_it_has_no_history():
    treated = of(1.0, 2.0).requires_grad_()
    assert not seed_interval(treated, of(0.0, 0.0)).value.requires_grad


@pytest.mark.usefixtures("no_type_checks")
def test_bad_input_is_refused_in_a_sentence():
    for treated, control, level, says in (
        (of(1, 2), of(1), 0.95, "shape"),
        (of(), of(), 0.95, "at least one seed"),
        (of(1, math.nan), of(0, 0), 0.95, "must be finite"),
        (of(1, 2), of(0, 0), 95, "level=95"),
    ):
        with pytest.raises(ValueError, match=says):
            seed_interval(treated, control, level)
    with pytest.raises(ValueError, match="degrees=0"):
        t_two_sided(0.95, 0)
