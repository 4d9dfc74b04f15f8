"""Clip fractions by side, effective sample size, spread of the ratio, and approximate KL."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from rlhf_lab.functional import (
    calc_value_function_loss,
    chi_square,
    clip_fraction,
    clip_fraction_high,
    clip_fraction_low,
    effective_sample_size,
    kl_estimate,
    kl_per_token,
    masked_mean,
    mean_ratio,
    ppo_surrogate,
    value_clip_fraction,
)

NAN, INF = float("nan"), float("inf")
RATIOS = tensor([[0.5, 1.0, 1.5, NAN], [0.75, 2.0, NAN, NAN]])
MASK = tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool()
ZEROS = torch.zeros(2, 4)


def drift(logprobs, old_logprobs, mask=None, kind="k3"):
    """KL(old || new) of each token, averaged: the old policy sampled, so it comes first."""
    return masked_mean(kl_estimate(old_logprobs, logprobs, kind, mask), mask)


OF_RATIOS = (mean_ratio, chi_square, effective_sample_size, drift)


def rollouts(seed):
    generator = torch.Generator().manual_seed(seed)
    logprobs, old, advantages = torch.randn(3, 3, 4, generator=generator, dtype=torch.float64)
    return logprobs, old, advantages, torch.rand(3, 4, generator=generator) < 0.7


def test_clip_fractions_by_hand():
    logprobs = RATIOS.log()
    # below 0.8: 0.5 and 0.75; above 1.2: 1.5 and 2; above 1.75: 2; of five
    assert clip_fraction_low(logprobs, ZEROS, 0.2, MASK).item() == pytest.approx(2 / 5)
    assert clip_fraction_high(logprobs, ZEROS, 0.2, MASK).item() == pytest.approx(2 / 5)
    assert clip_fraction_high(logprobs, ZEROS, 0.75, MASK).item() == pytest.approx(1 / 5)
    # negative at 0.5 and 2, positive at 0.75 and 1.5
    advantages = tensor([[-1.0, -1.0, 1.0, NAN], [1.0, -1.0, 0.0, 0.0]])
    low = clip_fraction_low(logprobs, ZEROS, 0.2, MASK, advantages)
    high = clip_fraction_high(logprobs, ZEROS, 0.2, MASK, advantages)
    assert [low.item(), high.item()] == pytest.approx([1 / 5, 1 / 5])


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_clip_fractions_add_up_and_say_where_the_gradient_is_gone(seed):
    logprobs, old, advantages, mask = rollouts(seed)
    both = clip_fraction_low(logprobs, old, 0.2, mask) + clip_fraction_high(
        logprobs, old, 0.2, mask
    )
    assert both.item() == pytest.approx(clip_fraction(logprobs, old, 0.2, mask).item())
    leaf = logprobs.clone().requires_grad_()
    ppo_surrogate(leaf, old, advantages, 0.2, mask=mask).sum().backward()
    flat = (leaf.grad == 0)[mask].double().mean().item() if mask.any() else 0.0
    active = clip_fraction_low(logprobs, old, 0.2, mask, advantages) + clip_fraction_high(
        logprobs, old, 0.2, mask, advantages
    )
    assert active.item() == pytest.approx(flat)


def test_value_clip_fraction_by_hand():
    # held at 0.2: error 0.8 against 0 (stopped), 0.2 against 1 (not), within the clip (not)
    values, returns = tensor([[1.0, 1.0, 0.1, NAN]]), tensor([[1.0, 0.0, 0.0, NAN]])
    mask = tensor([[True, True, True, False]])
    got = value_clip_fraction(values, returns, torch.zeros(1, 4), 0.2, mask)
    assert got.item() == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match=r"clip must .*got -0\.1"):
        value_clip_fraction(values, returns, values, -0.1)


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_value_clip_fraction_says_where_the_gradient_is_gone(seed):
    values, returns, old, mask = rollouts(seed)
    leaf = values.clone().requires_grad_()
    calc_value_function_loss(leaf, returns, 1.0, mask, old, 0.3).backward()
    flat = (leaf.grad == 0)[mask].double().mean().item() if mask.any() else 0.0
    assert value_clip_fraction(values, returns, old, 0.3, mask).item() == pytest.approx(flat)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shares_keep_the_precision_of_what_they_are_of(dtype):
    x, far = torch.zeros(1, 3, dtype=dtype), torch.ones(1, 3, dtype=dtype)
    for function in (clip_fraction, clip_fraction_low, clip_fraction_high):
        assert function(x, far, 0.2).dtype == dtype
    assert value_clip_fraction(x, far, far, 0.2).dtype == dtype


def test_spread_of_the_ratio_by_hand():
    logprobs = RATIOS.log()
    # 0.5, 1, 1.5, 0.75, 2: mean 1.15
    assert mean_ratio(logprobs, ZEROS, MASK).item() == pytest.approx(1.15)
    # .25 + 0 + .25 + .0625 + 1 = 1.5625
    assert chi_square(logprobs, ZEROS, MASK).item() == pytest.approx(1.5625 / 5)
    # 5.75^2 / (.25 + 1 + 2.25 + .5625 + 4)
    expected = 5.75**2 / 8.0625
    assert effective_sample_size(logprobs, ZEROS, MASK).item() == pytest.approx(expected)


def test_effective_sample_size_of_equal_and_of_lopsided_ratios():
    logprobs = torch.full((2, 3), -700.0)
    assert effective_sample_size(logprobs, torch.zeros(2, 3)).item() == pytest.approx(6.0)
    one = tensor([[200.0, 0.0, 0.0]])
    assert effective_sample_size(one, torch.zeros(1, 3)).item() == pytest.approx(1.0)


def test_approximate_kl_by_hand_is_that_of_the_old_policy():
    # old 1/2, new 1/4: d = log 2; k3 = exp(-d) - 1 + d
    old, new, log2 = tensor([[0.5]]).log(), tensor([[0.25]]).log(), math.log(2)
    assert drift(new, old, kind="k1").item() == pytest.approx(log2)
    assert drift(new, old, kind="k2").item() == pytest.approx(log2**2 / 2)
    assert drift(new, old).item() == pytest.approx(log2 - 0.5)
    with pytest.raises(Exception, match="k9"):
        drift(new, old, kind="k9")


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_expectations_under_the_old_policy_are_those_of_the_divergences(seed):
    # every token of the vocabulary, as often as the old policy samples it (out of 2^12)
    generator = torch.Generator().manual_seed(seed)
    counts = 2 ** torch.randint(0, 4, (4,), generator=generator)
    old = (counts.double() / counts.sum()).log()
    new = torch.randn(4, generator=generator, dtype=torch.float64).log_softmax(-1)
    tokens = torch.arange(4).repeat_interleave(counts)[None]
    logprobs, old_logprobs = new[tokens], old[tokens]
    assert mean_ratio(logprobs, old_logprobs).item() == pytest.approx(1.0)
    exact = kl_per_token(old[None, None], new[None, None]).item()
    for kind in ("k1", "k3"):
        got = drift(logprobs, old_logprobs, kind=kind).item()
        assert got == pytest.approx(exact, abs=1e-12)
    squares = (new.exp().square() / old.exp()).sum().item() - 1
    assert chi_square(logprobs, old_logprobs).item() == pytest.approx(squares)
    # n / ESS = 1 + chi^2, as the mean ratio is 1
    ess = effective_sample_size(logprobs, old_logprobs).item()
    assert tokens.numel() / ess == pytest.approx(1 + squares)


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_statistics_equal_numpy_on_the_real_tokens(seed):
    logprobs, old, _, mask = rollouts(seed)
    ratios = np.exp((logprobs - old)[mask].numpy())
    if ratios.size < 2:
        return
    assert mean_ratio(logprobs, old, mask).item() == pytest.approx(ratios.mean())
    assert chi_square(logprobs, old, mask).item() == pytest.approx(((ratios - 1) ** 2).mean())
    ess = ratios.sum() ** 2 / (ratios**2).sum()
    assert effective_sample_size(logprobs, old, mask).item() == pytest.approx(ess)
    for clip, function, outside in (
        (0.2, clip_fraction_low, ratios < 0.8),
        (0.3, clip_fraction_high, ratios > 1.3),
    ):
        assert function(logprobs, old, clip, mask).item() == pytest.approx(outside.mean())


def test_on_policy_everything_says_so():
    logprobs = torch.randn(2, 3)
    assert [f(logprobs, logprobs).item() for f in OF_RATIOS] == pytest.approx([1, 0, 6, 0])
    for fraction in (clip_fraction_low, clip_fraction_high):
        assert fraction(logprobs, logprobs, 0.0).item() == 0.0


def test_one_token_and_none():
    one = tensor([[-1.0]])
    assert [f(one, one).item() for f in OF_RATIOS] == pytest.approx([1, 0, 1, 0])
    nothing, nan = torch.zeros(1, 2).bool(), torch.full((1, 2), NAN)
    assert [f(nan, nan, nothing).item() for f in OF_RATIOS] == [0.0] * 4
    assert clip_fraction_low(nan, nan, 0.2, nothing).item() == 0.0
    assert value_clip_fraction(nan, nan, nan, 0.2, nothing).item() == 0.0


def test_float32_extremes_stay_finite():
    # exp(1000) is beyond float32; the ratio is held at exp(20), whose square is 2.4e17
    logprobs, old = tensor([[1000.0, -1000.0]]), torch.zeros(1, 2)
    for function in (mean_ratio, chi_square, effective_sample_size):
        assert function(logprobs, old).isfinite()
    assert effective_sample_size(logprobs, old).item() == pytest.approx(1.0)
    assert drift(logprobs, -logprobs, kind="k1").item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    # exp(12) = 162754.79 is beyond float16
    logprobs, old = tensor([[12.0]], dtype=dtype), tensor([[0.0]], dtype=dtype)
    assert mean_ratio(logprobs, old).item() == pytest.approx(math.exp(12), rel=1e-6)
    assert {f(logprobs, old).dtype for f in OF_RATIOS} == {torch.float32}
    # 300 tokens are not 300 in bfloat16's sums
    many = torch.zeros(1, 301, dtype=dtype)
    assert effective_sample_size(many, many).item() == pytest.approx(301.0)


def test_gradients_agree_with_finite_differences():
    torch.manual_seed(0)
    logprobs, old = torch.randn(2, 2, 3, dtype=torch.float64).requires_grad_()
    mask = tensor([[1, 1, 0], [0, 1, 0]]).bool()
    for function in OF_RATIOS:
        assert torch.autograd.gradcheck(lambda a, b, f=function: f(a, b, mask), (logprobs, old))
