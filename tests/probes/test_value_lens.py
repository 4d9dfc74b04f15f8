"""Value lens and ridge regressions by hand, R2 of held-out sequences, records of short runs."""

import numpy as np
import pytest
import torch

from rlhf_lab.functional import bootstrap_interval
from rlhf_lab.probes.probe import RESAMPLES
from rlhf_lab.probes.value_lens import (
    RESIDUAL_SITES,
    HeldOutFit,
    correlation_with,
    fit_ridge,
    held_out_fits,
    normalize_residual,
    r2_interval,
    value_lens,
)
from rlhf_lab.training.capture import capture_activations


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_lens_matches_the_final_norm_and_the_value(policy):
    model, generator = policy.base_model, torch.Generator().manual_seed(1)
    tokens = torch.randint(model.cfg.d_vocab, (3, 9), generator=generator)
    _, cache = model.run_with_cache(tokens)
    last = cache[f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"]
    normalized = normalize_residual(model, last)
    torch.testing.assert_close(normalized, cache["ln_final.hook_normalized"], atol=1e-6, rtol=1e-5)
    acts = capture_activations(policy, tokens, [*RESIDUAL_SITES, "values"])
    values = acts.pop("values")
    lens = value_lens(policy, torch.stack(list(acts.values())))
    torch.testing.assert_close(lens[-1], values, atol=1e-5, rtol=1e-5)
    assert lens.shape == (5, 3, 9) and (lens[0] - values).abs().max() > 1e-2


def test_ridge_matches_hand_computed():
    x, y = torch.tensor([[-1.0], [1.0]]), torch.tensor([-3.0, 3.0])
    # X'X = 2, which is also the variance times n: w = 6 / (2 + 0.5 * 2) = 2.
    slope, intercept = fit_ridge(x, y, torch.tensor([True, True]), 0.5)
    assert (slope.item(), intercept.item()) == pytest.approx((2.0, 0.0))


def test_r_squared_matches_hand_computed():
    y = torch.tensor([[0.0, 1.0, 2.0, 9.0], [4.0, 4.0, 4.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    predicted = torch.tensor([[0.0, 1.0, 1.0, 0.0], [4.0, 4.0, 4.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0], [1, 0, 0, 0]]).bool()
    # total 2, error 1; no variance; one row
    r2 = r2_interval([HeldOutFit(predicted, y, mask)], 4).value[0]
    assert r2[0] == 0.5 and r2.isnan().tolist() == [False, True, True]


@pytest.mark.parametrize("pooled", [False, True])
def test_interval_of_r2_resamples_whole_sequences(pooled):
    """Compared with a call of R2 per resample, on the sequences with all their tokens."""
    x = normal(2, 60, 3, 4)
    target = x[0] @ torch.tensor([1.0, -2.0, 0.5, 3.0]).double() + 2 * normal(60, 3, seed=1)
    target[:, 2] = 1.0
    mask = normal(60, 3, seed=2) < 0.8
    fits = held_out_fits(x, target, mask, pooled=pooled)
    found = r2_interval(fits, 20)
    assert found.n == 20 and found.value.shape == (2, 1 if pooled else 3)
    if not pooled:
        assert found.value[:, 2].isnan().all() and found.low[:, 2].isnan().all()
    tokens = 3 if pooled else 1
    rows = (part[0].reshape(20, tokens) for part in fits[0])
    total = lambda y: (y - y.mean()).square().sum()
    of_rows = lambda x, y, real: 1 - (y - x)[real].square().sum() / total(y[real])
    one = bootstrap_interval(*rows, statistic=of_rows, resamples=RESAMPLES)
    ends = torch.stack([found.low[0, 0], found.high[0, 0]])
    torch.testing.assert_close(ends, torch.stack([one.low, one.high]))


def test_correlations_match_numpy_where_the_mask_is_true():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 40, 3, generator=generator, dtype=torch.float64)
    y = y + 0.8 * x
    mask = torch.rand(40, 3, generator=generator) < 0.7
    x[:, 2] = 5.0
    found = correlation_with(x, 100 - 7 * y.where(mask, torch.nan), mask)
    for column in range(2):
        kept = mask[:, column]
        expected = -np.corrcoef(x[kept, column], y[kept, column])[0, 1]
        assert found.value[column].item() == pytest.approx(expected, abs=1e-12)
        assert found.low[column] < expected < found.high[column]
    assert found.value[2].isnan() and found.low[2].isnan()


def test_too_few_sequences_raise():
    with pytest.raises(ValueError, match="batch is 3"):
        held_out_fits(torch.zeros(1, 3, 2, 3), torch.zeros(3, 2), torch.ones(3, 2).bool())
