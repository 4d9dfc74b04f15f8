"""Exact and estimated KL between policy and reference."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor
from torch.distributions import Categorical, kl_divergence

from rlhf_lab.functional import (
    calc_kl_penalty,
    generated_logits,
    kl_estimate,
    kl_per_sequence,
    kl_per_token,
    log_probs,
)

NAN, INF = float("nan"), float("inf")
HALF = tensor([[[0.0, 0.0]]])
QUARTER = tensor([[[0.0, math.log(3)]]])
# KL((1/2, 1/2) || (1/4, 3/4)) = 1/2 log 2 + 1/2 log 2/3 = 1/2 log 4/3, and the other way round
FORWARD = 0.5 * math.log(4 / 3)
BACKWARD = 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)


def exact_kl(logits, ref_logits):
    """The KL of logits, through the log-probabilities of both."""
    return kl_per_token(log_probs(logits), log_probs(ref_logits))


def kl_by_loop(logits, ref_logits):
    """The definition in float64 numpy: softmax by hand, one sum per token."""
    p, q = (np.exp(z - z.max(-1, keepdims=True)) for z in (logits.numpy(), ref_logits.numpy()))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    return (p * np.log(p / q)).sum(-1)


def test_exact_kl_by_hand_is_of_the_policy_from_the_reference():
    assert exact_kl(HALF, QUARTER).item() == pytest.approx(FORWARD)
    assert exact_kl(QUARTER, HALF).item() == pytest.approx(BACKWARD)
    assert FORWARD != pytest.approx(BACKWARD)


@given(st.integers(0, 10_000), st.floats(0.1, 10))
@settings(max_examples=30, deadline=None)
def test_exact_kl_equals_the_definition_and_is_not_negative(seed, scale):
    generator = torch.Generator().manual_seed(seed)
    logits, ref = torch.randn(2, 2, 3, 5, generator=generator, dtype=torch.float64) * scale
    got = exact_kl(logits, ref)
    np.testing.assert_allclose(got.numpy(), kl_by_loop(logits, ref), rtol=1e-9, atol=1e-12)
    assert (got >= -1e-12).all()
    torch.testing.assert_close(exact_kl(logits + 5, ref - 3), got)
    expected = kl_divergence(Categorical(logits=logits), Categorical(logits=ref))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_identical_logits_give_exactly_zero(dtype):
    logits = (torch.randn(2, 3, 50) * 10).to(dtype)
    kl = exact_kl(logits, logits.clone())
    assert (kl == 0.0).all()
    assert kl.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_filtered_tokens_count_as_zero_and_impossible_references_as_inf():
    filtered = tensor([[[0.0, 0.0, -INF]]], requires_grad=True)
    # the policy is (1/2, 1/2, 0), the reference (1/3, 1/3, 1/3): log(3/2)
    kl = exact_kl(filtered, torch.zeros(1, 1, 3))
    assert kl.item() == pytest.approx(math.log(1.5))
    kl.sum().backward()
    assert filtered.grad.isfinite().all()
    assert exact_kl(filtered, filtered).item() == 0.0
    assert exact_kl(torch.zeros(1, 1, 3), filtered).item() == INF


@pytest.mark.parametrize("logit", [0.0, -20.0, -50.0])
def test_kl_is_inf_with_gradient_zero_when_the_reference_cannot(logit):
    """Token 1 has probability 1/2, 2e-9 and 2e-22; the second row is finite."""
    logits = tensor([[[0.0, logit], [0.0, 1.0]]], requires_grad=True)
    kl = exact_kl(logits, tensor([[[0.0, -INF], [0.0, 0.0]]]))
    assert kl[0, 0] == INF and kl[0, 1].isfinite()
    kl.sum().backward()
    assert (logits.grad[0, 0] == 0).all() and (logits.grad[0, 1] != 0).all()


def test_extreme_logits_stay_finite_in_value_and_gradient():
    logits = tensor([[[1e4, 0.0, -1e4]]], requires_grad=True)
    kl = exact_kl(logits, torch.zeros(1, 1, 3))
    assert kl.item() == pytest.approx(math.log(3))
    kl.sum().backward()
    assert logits.grad.isfinite().all()
    # probability exp(-1e4) underflows to 0, so a reference without that token costs nothing
    assert exact_kl(tensor([[[0.0, -1e4]]]), tensor([[[0.0, -INF]]])).item() == 0.0


def test_kl_per_sequence_sums_the_real_tokens():
    kl = tensor([[0.5, 0.25, NAN], [NAN, NAN, NAN]])
    mask = tensor([[True, True, False], [False, False, False]])
    assert kl_per_sequence(kl, mask).tolist() == [0.75, 0.0]


def test_penalty_by_hand_takes_the_mean_over_real_tokens():
    kl = tensor([[0.25, 0.75, NAN], [INF, NAN, INF]], requires_grad=True)
    mask = tensor([[True, True, False], [False, False, False]])
    penalty = calc_kl_penalty(kl, 2.5, mask)
    assert penalty.item() == pytest.approx(2.5 * (0.25 + 0.75) / 2)
    penalty.backward()
    assert kl.grad.tolist() == [[1.25, 1.25, 0.0], [0.0, 0.0, 0.0]]
    assert calc_kl_penalty(kl, 2.5, mask, denominator=10).item() == pytest.approx(0.25)


@pytest.mark.parametrize("garbage", [3e38, -3e38, INF, -INF])
def test_penalty_ignores_garbage_logits_at_masked_tokens(garbage):
    """Value and gradient, with the garbage in one entry or in all of a row."""
    padding = torch.full((1, 2, 2), garbage)
    padding[0, 0, 1] = 0.0
    logits = torch.cat([HALF, QUARTER, padding], dim=1).requires_grad_()
    ref = torch.cat([QUARTER, HALF, padding.flip(1)], dim=1)
    mask = tensor([[True, True, False, False]])
    for first, second in ((logits, ref), (ref, logits)):
        penalty = calc_kl_penalty(exact_kl(first, second), 2.5, mask)
        assert penalty.item() == pytest.approx(2.5 * (FORWARD + BACKWARD) / 2)
        (grad,) = torch.autograd.grad(penalty, logits)
        assert grad.isfinite().all() and (grad[0, 2:] == 0).all() and (grad[0, :2] != 0).all()


def test_penalty_does_not_average_over_prompt_positions():
    # three prompt states, one state before the one generated token, one final state: only the
    # fourth (index 3) counts, where the KL is FORWARD; a mean over all five would be a fifth of it
    zeros = torch.zeros(1, 5, 2)
    ref = zeros.clone()
    ref[0, 3] = QUARTER
    kl = exact_kl(generated_logits(zeros, 4), generated_logits(ref, 4))
    assert calc_kl_penalty(kl, 1.0).item() == pytest.approx(FORWARD)


def test_all_masked_penalty_is_zero():
    kl = torch.full((1, 2), NAN, requires_grad=True)
    penalty = calc_kl_penalty(kl, 1.0, torch.zeros(1, 2).bool())
    penalty.backward()
    assert penalty.item() == 0.0 and (kl.grad == 0).all()


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_penalties_of_micro_batches_add_up(seed):
    generator = torch.Generator().manual_seed(seed)
    logits, ref = torch.randn(2, 4, 3, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 3, generator=generator) < 0.6
    tokens, kl = int(mask.sum()), exact_kl(logits, ref)
    parts = [calc_kl_penalty(kl[i : i + 2], 0.3, mask[i : i + 2], tokens) for i in (0, 2)]
    real = kl_by_loop(logits, ref)[mask.numpy()]
    expected = 0.3 * real.mean() if tokens else 0.0
    assert sum(parts).item() == pytest.approx(expected, rel=1e-9)


def test_gradients_agree_with_finite_differences():
    torch.manual_seed(0)
    logits, ref = (torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in "ab")
    mask = tensor([[1, 1, 0], [0, 0, 0]]).bool()
    check = torch.autograd.gradcheck
    assert check(exact_kl, (logits, ref))
    assert check(lambda a, b: calc_kl_penalty(exact_kl(a, b), 0.7, mask), (logits, ref))
    assert check(lambda a: calc_kl_penalty(a, 0.7, mask), logits[..., 0])
    for kind in ("k1", "k2", "k3"):
        assert check(lambda a, b, k=kind: kl_estimate(a, b, k), (logits[..., 0], ref[..., 0]))
    assert check(lambda a: kl_per_sequence(a, mask), logits[..., 0])


@pytest.mark.parametrize("policy_logit", [-INF, -800.0, -1e4])
@pytest.mark.parametrize("ref_logit", [-INF, -800.0, 0.5])
def test_gradients_match_differences_at_probability_zero(policy_logit, ref_logit):
    """Token 1 has probability 0 under the policy (exp(-800) underflows), and 0 or more before."""
    torch.manual_seed(1)
    column = tensor([1])
    logits, ref = (
        torch.randn(2, 3, 4, dtype=torch.float64).index_fill(-1, column, logit).requires_grad_()
        for logit in (policy_logit, ref_logit)
    )
    assert torch.autograd.gradcheck(exact_kl, (logits, ref))
    kl = exact_kl(logits, ref)
    # the same KL without the token, which the reference gives probability q
    others = [x[..., [0, 2, 3]] for x in (logits, ref)]
    q = ref.softmax(-1)[..., 1]
    torch.testing.assert_close(kl, exact_kl(*others) - torch.log1p(-q))


def test_estimates_by_hand():
    # pi = 1/2, ref = 1/4: d = log 2; k2 = (log 2)^2 / 2; k3 = 1/2 - 1 + log 2
    pi, ref = tensor([[math.log(1 / 2)]]), tensor([[math.log(1 / 4)]])
    log2 = math.log(2)
    assert kl_estimate(pi, ref, "k1").item() == pytest.approx(log2)
    assert kl_estimate(pi, ref, "k2").item() == pytest.approx(log2**2 / 2)
    assert kl_estimate(pi, ref, "k3").item() == pytest.approx(log2 - 0.5)
    # the other way round: d = -log 2; k3 = 2 - 1 - log 2
    assert kl_estimate(ref, pi, "k1").item() == pytest.approx(-log2)
    assert kl_estimate(ref, pi, "k3").item() == pytest.approx(1 - log2)


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_k1_and_k3_are_unbiased_under_the_policy_and_k3_is_not_negative(seed):
    generator = torch.Generator().manual_seed(seed)
    logits, ref_logits = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    pi, ref = torch.softmax(logits, -1).numpy(), torch.softmax(ref_logits, -1).numpy()
    exact = (pi * np.log(pi / ref)).sum()
    logprobs, ref_logprobs = torch.from_numpy(np.log([pi])), torch.from_numpy(np.log([ref]))
    k3 = kl_estimate(logprobs, ref_logprobs, "k3")
    assert (k3 >= 0).all()
    # the expectation over every token, weighted with its probability
    assert (pi * k3.numpy()[0]).sum() == pytest.approx(exact, rel=1e-9, abs=1e-12)
    k1 = kl_estimate(logprobs, ref_logprobs, "k1").numpy()[0]
    assert (pi * k1).sum() == pytest.approx(exact, rel=1e-9, abs=1e-12)


def test_estimates_at_float32_extremes():
    gap = tensor([[80.0, -80.0, 1e4, 1e-4]])
    zero = torch.zeros_like(gap)
    k3 = kl_estimate(gap, zero, "k3")[0].double()
    # d = 80: 80 - 1; d = -80: exp(80) - 81; d = 1e4: 9999; d = 1e-4: d^2 / 2 = 5e-9
    assert k3[0].item() == pytest.approx(79.0)
    assert k3[1].item() == pytest.approx(math.exp(80), rel=1e-5)
    assert k3[2].item() == pytest.approx(9999.0)
    assert k3[3].item() == pytest.approx(5e-9, rel=1e-2)
    assert kl_estimate(gap, zero, "k2").isfinite().all()
    assert (kl_estimate(gap, gap, "k3") == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_estimates_are_computed_in_float32(dtype):
    # exp(12) = 162754.79 is beyond float16
    got = kl_estimate(tensor([[-12.0]], dtype=dtype), tensor([[0.0]], dtype=dtype), "k3")
    assert got.item() == pytest.approx(math.exp(12) - 13, rel=1e-6)


def test_an_unknown_estimator_is_refused():
    with pytest.raises(Exception, match="k4"):
        kl_estimate(torch.zeros(1, 1), torch.zeros(1, 1), "k4")
