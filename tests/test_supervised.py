"""Tests the loop that reward models, fine-tuning and the bundled models share."""

import numpy as np
import pytest
import torch
from torch import nn

from rlhf_lab.errors import ConfigError
from rlhf_lab.fitting import FitConfig
from rlhf_lab.supervised import first_and_last, fit, fit_rows, hold_out, learning_rate_factor


def test_learning_rate_rises_linearly_and_falls_along_half_a_cosine():
    # 100 steps: 5 of warm-up, then half a cosine over 95: half-way, at 52.5, the factor is 1/2.
    factors = [learning_rate_factor(step, 100) for step in range(100)]
    assert factors[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert (factors[52] + factors[53]) / 2 == pytest.approx(0.5, abs=1e-3)
    assert factors[99] == pytest.approx(0.0, abs=1e-3)


def test_every_row_is_set_aside_or_trained_on_and_never_both():
    held_out, train = hold_out(40, 0.25, np.random.default_rng(0))
    assert (len(held_out), len(train)) == (10, 30)
    assert sorted([*held_out, *train]) == list(range(40))


@pytest.mark.parametrize(("share", "expected"), [(0.01, 1), (0.99, 2)])
def test_at_least_one_row_is_left_on_either_side(share, expected):
    held_out, _ = hold_out(3, share, np.random.default_rng(0))
    assert len(held_out) == expected


def test_one_example_cannot_be_split():
    with pytest.raises(ConfigError, match="Use at least 2"):
        hold_out(1, 0.2, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"steps": 0}, "steps=0"),
        ({"batch_size": -1}, "batch_size=-1"),
        ({"held_out": 0.0}, "held_out=0.0"),
        ({"learning_rate": float("inf")}, "learning_rate=inf"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
    ],
)
def test_settings_out_of_range_are_refused(change, word):
    with pytest.raises(ConfigError, match=word):
        FitConfig(**change)


def test_batches_are_of_the_rows_to_train_on_without_repeats():
    weight, seen = nn.Linear(1, 1, bias=False), []

    def loss(rows):
        seen.append(sorted(rows))
        return weight.weight.square().sum()

    fitting = FitConfig(steps=20, batch_size=3, show_progress=False)
    rows, rng = np.array([2, 5, 7, 11]), np.random.default_rng(0)
    losses = fit_rows(weight, rows, loss, fitting, rng, "")
    assert all(len(set(rows)) == 3 and set(rows) <= {2, 5, 7, 11} for rows in seen)
    assert len({tuple(rows) for rows in seen}) == 4
    assert len(losses) == 20 and losses[-1] < losses[0]


def test_batches_are_no_larger_than_what_there_is():
    weight, seen = nn.Linear(1, 1, bias=False), []

    def loss(rows):
        seen.append(len(rows))
        return weight.weight.sum()

    fitting = FitConfig(steps=1, batch_size=64, show_progress=False)
    fit_rows(weight, np.array([4, 9]), loss, fitting, np.random.default_rng(0), "")
    assert seen == [2]


def test_two_steps_equal_adamw_worked_by_hand():
    """w = 1 with loss 3 w: the gradient is clipped to 1, and AdamW's step of a constant gradient
    is the learning rate. Of 2 steps the first is all of the warm-up, and half a cosine starts at
    the second: both at .1. w = (1 - .1 * .01) 1 - .1 = .899; then .899 * .999 - .1 = .798101.
    """
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    losses = fit(model, lambda: 3 * model.weight.sum(), 2, 0.1, "", False)
    assert losses.tolist() == pytest.approx([3.0, 3 * 0.899])
    assert model.weight.item() == pytest.approx(0.798101, abs=1e-6)


def test_frozen_weights_stay():
    model = nn.Linear(2, 1)
    model.weight.requires_grad_(False)
    before = model.weight.clone()
    fit(model, lambda: model(torch.ones(1, 2)).square().sum(), 2, 0.1, "", False)
    assert torch.equal(model.weight, before)


def test_the_first_and_the_last_tenth_worked_by_hand():
    """20 losses 0..19: the first two have mean .5, the last two 18.5."""
    assert first_and_last(torch.arange(20.0)) == (0.5, 18.5)
    assert first_and_last(torch.tensor([3.0, 5.0])) == (3.0, 5.0)
