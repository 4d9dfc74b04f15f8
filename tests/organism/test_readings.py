"""Tests the figures of linear probes that `tools.reel check` reports, on planted activations."""

import pytest
import torch

from tools.reel.readings import readings, value_reading, verdict_reading


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_half_of_a_value_is_read_where_as_much_noise_lies_over_it():
    """Site 0 is noise, site 1 the value and noise of its variance: R2 is 1/2 in the best of them.

    The standard error of R2 is 2 r (1 - r^2) / sqrt(n) = .0158 for n = 2000: 95 % are +- .031.
    """
    y, noise, other = torch.randn(3, 6000, generator=seeded())
    x = torch.stack([other, y + noise])[..., None]
    found = value_reading("half", x, y, 4000)
    assert found.name == "half"
    assert found.value == pytest.approx(0.5, abs=4 * 0.0158)
    assert found.low < found.value < found.high
    assert (found.high - found.low) / 2 == pytest.approx(0.031, rel=0.25)


def test_a_value_that_is_linear_in_a_site_is_read_whole():
    x = torch.randn(2, 300, 5, generator=seeded())
    found = value_reading("whole", x, x[1] @ torch.arange(5.0) + 2, 200)
    assert found.low == pytest.approx(1, abs=1e-6) and found.high == pytest.approx(1, abs=1e-6)


def test_what_was_fitted_is_not_what_is_measured():
    """64 slopes for 100 rows of pure noise explain most of these rows, and nothing of others."""
    x = torch.randn(1, 200, 64, generator=seeded())
    y = torch.randn(200, generator=seeded(1))
    assert value_reading("nothing", x, y, 100).value < 0


def test_a_direction_that_decides_as_the_best_rule_has_no_excess():
    positive = torch.arange(300) % 2 == 0
    x = torch.where(positive, 1.0, -1.0)[None, :, None] + torch.zeros(1, 300, 3)
    x = x + 0.01 * torch.randn(1, 300, 3, generator=seeded())
    found = verdict_reading("verdict", x, positive, positive, 200)
    assert (found.value, found.low, found.high) == (0, 0, 0)


def test_a_direction_that_knows_nothing_falls_short_by_what_the_best_rule_knows():
    """The best rule is always right, chance half the time: -1/2, +- 1.96 sqrt(.25 / 1000)."""
    positive = torch.rand(3000, generator=seeded(2)) < 0.5
    x = torch.randn(2, 3000, 4, generator=seeded(3))
    found = verdict_reading("chance", x, positive, positive, 2000)
    assert found.value == pytest.approx(-0.5, abs=4 * 0.0158)
    assert (found.high - found.low) / 2 == pytest.approx(0.031, abs=0.002)


@pytest.mark.slow
def test_bundled_models_are_read_at_every_slot_that_says_something():
    found = {reading.name: reading for reading in readings("reel-nano", 600, seed=5)}
    slots = ("ADJ 1", "CONN 2", "ADJ 2", "CONN 3", "ADJ 3", "VERB")
    assert [name for name in found if name.startswith("accuracy")] == [
        f"accuracy less Bayes at {slot}" for slot in slots
    ]
    assert all(reading.low <= reading.value <= reading.high for reading in found.values())
    assert found["R2 of the value at CONN 2"].value > 0.9
    # the reward of a whole clause, which one adjective and its "wasn't" give
    assert found["accuracy less Bayes at ADJ 1"].value == pytest.approx(0, abs=0.02)
