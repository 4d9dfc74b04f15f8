"""Supervised training: schedule, hold-out split and steps by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from rlhf_lab.errors import ConfigError
from rlhf_lab.supervised import first_and_last, fit, hold_out, learning_rate_factor


def test_learning_rate_warms_up_and_follows_half_a_cosine():
    """100 steps: 5 of warm-up, then half a cosine over 95, whose middle is at 52.5."""
    factors = [learning_rate_factor(step, 100) for step in range(100)]
    assert factors[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert (factors[52] + factors[53]) / 2 == pytest.approx(0.5, abs=1e-3)
    assert factors[99] == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize(
    ("n_rows", "fraction", "n_held_out"), [(40, 0.25, 10), (3, 0.01, 1), (3, 0.99, 2)]
)
def test_hold_out_splits_every_row_once(n_rows, fraction, n_held_out):
    held_out, train = hold_out(n_rows, fraction, np.random.default_rng(0))
    assert len(held_out) == n_held_out and sorted([*held_out, *train]) == list(range(n_rows))
    with pytest.raises(ConfigError, match="examples must have at least 2 rows, .* got 1.$"):
        hold_out(1, fraction, np.random.default_rng(0))


@pytest.mark.slow
def test_two_steps_match_hand_computed_adamw():
    """w = 1 with losses 3 w and w / 2: gradients 1 (clipped) and 1/2. Of 2 steps, the first is all
    of the warm-up and the second starts half a cosine: both have the learning rate .1.
    w = (1 - .1 * .01) 1 - .1 = .899; then m / sqrt(v) = (.14 / .19) / sqrt(.0246 / .0396) = .93488,
    w = .999 * .899 - .093488 = .804613.
    """
    model, slopes = nn.Linear(1, 1, bias=False), iter([3.0, 0.5])
    model.weight.data.fill_(1.0)
    losses = fit(model, lambda: next(slopes) * model.weight.sum(), 2, 0.1, "", False)
    assert losses.tolist() == pytest.approx([3.0, 0.899 / 2])
    assert model.weight.item() == pytest.approx(0.804613, abs=1e-6)


@pytest.mark.slow
def test_frozen_weights_stay_and_nan_raises():
    model = nn.Linear(2, 1)
    model.weight.requires_grad_(False)
    before = model.weight.clone()
    fit(model, lambda: model(torch.ones(1, 2)).square().sum(), 2, 0.1, "", False)
    assert torch.equal(model.weight, before)
    with pytest.raises(ConfigError, match="loss is nan at step 1,.*learning_rate=0.1"):
        fit(model, lambda: model.bias.sum() * float("nan"), 2, 0.1, "", False)


def test_first_and_last_match_hand_computed():
    """20 losses 0..19: the first two have mean .5, the last two 18.5."""
    assert first_and_last(torch.arange(20.0)) == (0.5, 18.5)
    assert first_and_last(torch.tensor([3.0, 5.0])) == (3.0, 5.0)
