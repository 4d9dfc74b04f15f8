"""Entropy of the next-token distribution."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor
from torch.distributions import Categorical

from rlhf_lab.functional import (
    calc_entropy_bonus,
    entropy_per_token,
    generated_logits,
    log_probs,
)

NAN, INF = float("nan"), float("inf")
# probabilities (1/4, 3/4): 1/4 log 4 + 3/4 log 4/3
QUARTER = tensor([[[0.0, math.log(3)]]])
QUARTER_ENTROPY = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)


def exact_entropy(logits):
    """The entropy of logits, through log-probabilities."""
    return entropy_per_token(log_probs(logits))


def entropy_by_loop(logits):
    """The definition in float64 numpy."""
    p = np.exp(logits.numpy())
    p = p / p.sum(-1, keepdims=True)
    return -(p * np.log(p)).sum(-1)


def test_entropy_by_hand():
    assert exact_entropy(QUARTER).item() == pytest.approx(QUARTER_ENTROPY)
    assert exact_entropy(torch.zeros(1, 1, 8)).item() == pytest.approx(math.log(8))


@given(st.integers(0, 10_000), st.floats(0.1, 5), st.integers(2, 6))
@settings(max_examples=30, deadline=None)
def test_entropy_equals_the_definition_and_keeps_its_bounds(seed, scale, d_vocab):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, d_vocab, generator=generator, dtype=torch.float64) * scale
    got = exact_entropy(logits)
    np.testing.assert_allclose(got.numpy(), entropy_by_loop(logits), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(got, Categorical(logits=logits).entropy())
    assert (got >= 0).all() and (got <= math.log(d_vocab) + 1e-12).all()


def test_filtered_tokens_and_certainty_have_finite_entropy_and_gradient():
    logits = tensor([[[0.0, 0.0, -INF], [1e4, 0.0, -1e4]]], requires_grad=True)
    entropy = exact_entropy(logits)
    # two equal tokens: log 2; one certain token: 0
    assert entropy[0].tolist() == pytest.approx([math.log(2), 0.0])
    entropy.sum().backward()
    assert logits.grad.isfinite().all()


def test_bonus_by_hand_takes_the_mean_over_real_tokens():
    entropy = tensor([[0.5, 1.5, NAN], [INF, NAN, INF]], requires_grad=True)
    mask = tensor([[True, True, False], [False, False, False]])
    bonus = calc_entropy_bonus(entropy, 0.5, mask)
    assert bonus.item() == pytest.approx(0.5)
    bonus.backward()
    assert entropy.grad.tolist() == [[0.25, 0.25, 0.0], [0.0, 0.0, 0.0]]
    assert calc_entropy_bonus(entropy, 0.5, mask, denominator=8).item() == pytest.approx(0.125)


@pytest.mark.parametrize("garbage", [3e38, -3e38, INF, -INF])
def test_bonus_ignores_garbage_logits_at_masked_tokens(garbage):
    """Value and gradient, with the garbage in one entry or in all of a row."""
    padding = torch.full((1, 2, 2), garbage)
    padding[0, 0, 1] = 0.0
    logits = torch.cat([QUARTER, torch.zeros(1, 1, 2), padding], dim=1).requires_grad_()
    mask = tensor([[True, True, False, False]])
    bonus = calc_entropy_bonus(exact_entropy(logits), 0.5, mask)
    assert bonus.item() == pytest.approx(0.5 * (QUARTER_ENTROPY + math.log(2)) / 2)
    bonus.backward()
    assert logits.grad.isfinite().all() and (logits.grad[0, 2:] == 0).all()
    assert (logits.grad[0, 0] != 0).all()


def test_bonus_does_not_average_over_prompt_positions():
    # undecided at the three prompt states and the final one, certain where the token was drawn
    logits = torch.zeros(1, 5, 2)
    logits[0, 3] = tensor([1e4, 0.0])
    assert calc_entropy_bonus(exact_entropy(generated_logits(logits, 4)), 1.0).item() == 0.0


def test_all_masked_bonus_is_zero():
    entropy = torch.full((1, 2), INF, requires_grad=True)
    bonus = calc_entropy_bonus(entropy, 1.0, torch.zeros(1, 2).bool())
    bonus.backward()
    assert bonus.item() == 0.0 and (entropy.grad == 0).all()


def test_bonuses_of_micro_batches_add_up():
    torch.manual_seed(0)
    logits = torch.randn(4, 3, 5, dtype=torch.float64)
    mask = tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]]).bool()
    entropy = exact_entropy(logits)
    parts = [calc_entropy_bonus(entropy[i : i + 1], 0.3, mask[i : i + 1], 6) for i in range(4)]
    expected = 0.3 * entropy_by_loop(logits)[mask.numpy()].mean()
    assert sum(parts).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_normalized_in_float32(dtype):
    logits = torch.randn(2, 3, 50).to(dtype)
    got = exact_entropy(logits)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), entropy_by_loop(logits.double()), atol=1e-5)


def test_gradients_agree_with_finite_differences():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    mask = tensor([[1, 1, 0], [0, 0, 0]]).bool()
    check = torch.autograd.gradcheck
    assert check(exact_entropy, logits)
    assert check(lambda z: calc_entropy_bonus(exact_entropy(z), 0.7, mask), logits)
    assert check(lambda h: calc_entropy_bonus(h, 0.7, mask), logits[..., 0])


@pytest.mark.parametrize("logit", [-INF, -800.0, -1e4])
def test_gradient_matches_differences_at_probability_zero(logit):
    torch.manual_seed(1)
    logits = torch.randn(2, 3, 4, dtype=torch.float64).index_fill(-1, tensor([1]), logit)
    assert torch.autograd.gradcheck(exact_entropy, logits.requires_grad_())
    torch.testing.assert_close(exact_entropy(logits), exact_entropy(logits[..., [0, 2, 3]]))
