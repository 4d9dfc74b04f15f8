"""Agreement of two models' logits: figures by hand, and what rounding and faults make of them."""

import math

import pytest
import torch

from rlhf_lab.models.agreement import Agreement, agreement


def test_by_hand():
    """Probabilities (1/2, 1/2) and (1/4, 3/4): log-probs ln 2 and ln 1.5 apart."""
    ours = torch.tensor([[0.0, 0.0]])
    theirs = torch.tensor([[0.0, math.log(3)]])
    found = agreement(ours, theirs)
    low, high = math.log(2), math.log(1.5)
    assert found.weighed == pytest.approx(3 / 8 * low + 5 / 8 * high)
    assert found.relative == pytest.approx(low / (1 + math.log(2)))
    assert not found.holds


def test_a_shift_of_all_logits_is_no_difference():
    logits = torch.randn(3, 5, 11, generator=torch.Generator().manual_seed(0))
    found = agreement(logits, logits.double() + 7)
    assert found.holds and found.weighed < 1e-6


def test_an_unlikely_token_that_rounding_moves_weighs_little():
    """A log-prob of -23.7 that is off by 3.56e-4, as transformers' norms make it on SmolLM2."""
    ours = torch.tensor([[0.0, -23.7]], dtype=torch.float64)
    theirs = ours + torch.tensor([[0.0, 3.56e-4]])
    found = agreement(ours, theirs)
    assert found.weighed < 1e-12
    assert found.relative == pytest.approx(3.56e-4 / 24.7, rel=1e-3)
    assert found.holds


@pytest.mark.parametrize("where", [0, 1])
def test_a_token_that_only_one_of_both_finds_likely_is_seen(where):
    logits = [torch.tensor([[0.0, -30.0, 0.0]], dtype=torch.float64) for _ in range(2)]
    logits[where][0, 1] = 0.0
    assert not agreement(*logits).holds


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_never_agree(bad):
    logits = torch.zeros(1, 3)
    spoilt = logits.clone()
    spoilt[0, 1] = bad
    assert not agreement(logits, spoilt).holds and not agreement(spoilt, logits).holds
    assert not Agreement(bad, 0.0).holds and not Agreement(0.0, bad).holds
