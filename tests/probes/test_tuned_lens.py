"""Translators of the tuned lens, and ridge penalties chosen on held-out texts."""

import torch

from rlhf_lab.probes.tuned_lens import (
    PENALTIES,
    best_ridge,
    fit_translator,
    ridge_errors,
    ridge_path,
    spread_over,
)
from rlhf_lab.probes.value_lens import fit_ridge
from tests.probes.test_value_lens import normal

EVERYWHERE = torch.ones(60, 3, dtype=torch.bool)


def test_ridge_path_matches_fit_ridge_for_each_penalty():
    x, y, mask = normal(2, 30, 5), normal(2, 30, 3, seed=1), normal(2, 30, seed=2) < 0.5
    for ridge, found in zip(PENALTIES, ridge_path(x, y, mask, PENALTIES), strict=True):
        for column in range(3):
            slope, intercept = fit_ridge(x, y[..., column], mask, ridge)
            torch.testing.assert_close(found.weight[..., column], slope)
            torch.testing.assert_close(found.bias[..., column], intercept)


def test_translator_is_found_and_ignores_masked_rows():
    x, weight, bias = normal(60, 3, 4), normal(4, 4, seed=1), normal(4, seed=2)
    last, mask = x @ weight + bias, EVERYWHERE.clone()
    mask[::2, 1], last[::2, 1] = False, 1e6
    found = fit_translator(x, last, mask, 1e-9)
    torch.testing.assert_close(found(x), x @ weight + bias, atol=1e-6, rtol=1e-6)
    assert found(x.float()).dtype == torch.float32


def test_errors_are_fractions_of_the_variance_of_later_texts():
    x, y = normal(60, 3, 4), normal(60, 3, 1, seed=1) + 5
    y[:, 0] += 3 * x[:, 0, :1]
    y[:, 2] = 1.0
    errors = ridge_errors(x, y, EVERYWHERE)
    slope, intercept = fit_ridge(x[:45, 0], y[:45, 0, 0], EVERYWHERE[:45, 0], PENALTIES[3])
    left = y[45:, 0, 0] - x[45:, 0] @ slope - intercept
    expected = left.square().mean() / y[45:, 0, 0].var(correction=0)
    torch.testing.assert_close(errors[0, 3], expected)
    assert errors[2].isnan().all()  # this target does not vary
    pooled = ridge_errors(x[:, :1].repeat(1, 3, 1), y[:, :1].repeat(1, 3, 1), EVERYWHERE, True)
    torch.testing.assert_close(pooled[0], errors[0])


def test_best_penalty_ignores_undefined_cells():
    errors = torch.tensor([[0.1, 0.5], [0.9, 0.2], [torch.nan, torch.nan]])
    assert best_ridge(errors, (1.0, 2.0)) == 2.0


def test_spread_sites_include_both_ends():
    assert spread_over(5) == [0, 1, 2, 3, 4] and spread_over(1) == [0]
    assert spread_over(61) == [0, 8, 15, 22, 30, 38, 45, 52, 60]
