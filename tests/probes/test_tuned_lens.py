"""Translators of the tuned lens, and ridge penalties chosen on held-out texts."""

import torch

from rlhf_lab.probes.tuned_lens import (
    PENALTIES,
    best_ridge,
    fit_translator,
    held_out_translation,
    spread_over,
)
from rlhf_lab.probes.value_lens import HeldOutFit, fit_ridge
from tests.probes.test_value_lens import normal

EVERYWHERE = torch.ones(60, 3, dtype=torch.bool)


def test_translator_matches_fit_ridge_in_each_dimension():
    x, last, mask = normal(20, 3, 5), normal(20, 3, 5, seed=1), normal(20, 3, seed=2) < 0.5
    for ridge in PENALTIES:
        found = fit_translator(x, last, mask, ridge)
        for i in range(5):
            y = last[..., i].flatten()
            slope, intercept = fit_ridge(x.flatten(0, 1), y, mask.flatten(), ridge)
            torch.testing.assert_close(found.weight[:, i], slope)
            torch.testing.assert_close(found.bias[i], intercept)


def test_translator_is_found_and_ignores_masked_rows():
    x, weight, bias = normal(60, 3, 4), normal(4, 4, seed=1), normal(4, seed=2)
    last, mask = x @ weight + bias, EVERYWHERE.clone()
    mask[::2, 1], last[::2, 1] = False, 1e6
    found = fit_translator(x, last, mask, 1e-9)
    torch.testing.assert_close(found(x), x @ weight + bias, atol=1e-6, rtol=1e-6)
    assert found(x.float()).dtype == torch.float32


def test_translation_is_fitted_to_two_thirds_of_the_sequences():
    x, last, mask = normal(60, 3, 4), normal(60, 3, 4, seed=1), normal(60, 3, seed=2) < 0.5
    found = held_out_translation(x, last, mask, 0.1)
    expected = fit_translator(x[:40], last[:40], mask[:40], 0.1)(x[40:])
    torch.testing.assert_close(found.predicted, expected.flatten(0, 1).T)
    assert torch.equal(found.y[1], last[40:, :, 1].flatten())
    assert torch.equal(found.mask[1], mask[40:].flatten())


def test_best_penalty_has_the_highest_r2_over_defined_cells():
    y = torch.stack([torch.arange(8.0), torch.ones(8)])  # the second row does not vary
    error = dict(zip(PENALTIES, (3.0, 2.0, 2.0, 0.5, 1.0, 4.0, 9.0), strict=True))
    everywhere = torch.ones_like(y).bool()
    fit = lambda ridge: [HeldOutFit(y + error[ridge], y, everywhere)]
    assert best_ridge(fit) == PENALTIES[3]


def test_spread_sites_include_both_ends():
    assert spread_over(5) == [0, 1, 2, 3, 4] and spread_over(1) == [0]
    assert spread_over(61) == [0, 8, 15, 22, 30, 38, 45, 52, 60]
