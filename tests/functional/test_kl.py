"""Exact and estimated KL of the policy from the reference."""

import math

import pytest
import torch
from torch import tensor

from rlhf_lab import functional as F
from tests.functional.calls import draw, seeds

NAN, INF = float("nan"), float("inf")
LOG2 = math.log(2)
HALF = tensor([[[0.0, 0.0]]])
QUARTER = tensor([[[0.0, math.log(3)]]])
# KL((1/2, 1/2) || (1/4, 3/4)) = 1/2 log 2 + 1/2 log 2/3 = 1/2 log 4/3, and the reverse
FORWARD = 0.5 * math.log(4 / 3)
BACKWARD = 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)


def exact_kl(logits, ref_logits):
    return F.kl_per_token(F.log_probs(logits), F.log_probs(ref_logits))


def test_exact_kl_matches_hand_computed():
    assert exact_kl(HALF, QUARTER).item() == pytest.approx(FORWARD)
    assert exact_kl(QUARTER, HALF).item() == pytest.approx(BACKWARD)
    kl = tensor([[0.5, 0.25, NAN]])
    mask = tensor([[True, True, False]])
    assert F.kl_per_sequence(kl, mask).tolist() == [0.75]
    assert F.calc_kl_penalty(kl, 2.0, mask).item() == pytest.approx(0.75)
    # only the state before the generated token counts, not prompt and last position
    ref = torch.zeros(1, 5, 2)
    ref[0, 3] = QUARTER
    penalty = F.calc_kl_penalty(
        exact_kl(F.generated_logits(torch.zeros(1, 5, 2), 4), F.generated_logits(ref, 4)), 1.0
    )
    assert penalty.item() == pytest.approx(FORWARD)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_identical_logits_give_exactly_zero(dtype):
    logits = (torch.randn(2, 3, 50) * 10).to(dtype)
    assert not exact_kl(logits, logits.clone()).any()


def test_exact_kl_of_filtered_and_extreme_logits_is_finite():
    filtered = tensor([[[0.0, 0.0, -INF], [1e4, 0.0, -1e4]]], requires_grad=True)
    # (1/2, 1/2, 0) and (1, 0, 0) from (1/3, 1/3, 1/3)
    kl = exact_kl(filtered, torch.zeros(1, 2, 3))
    assert kl[0].tolist() == pytest.approx([math.log(1.5), math.log(3)])
    kl.sum().backward()
    assert filtered.grad.isfinite().all()
    assert not exact_kl(filtered, filtered).any()
    # exp(-1e4) underflows to 0
    assert exact_kl(tensor([[[0.0, -1e4]]]), tensor([[[0.0, -INF]]])).item() == 0.0


@pytest.mark.parametrize("logit", [0.0, -20.0, -50.0])
def test_exact_kl_is_inf_with_gradient_zero_without_support(logit):
    """The policy's probability of token 1 is 1/2, 2e-9 and 2e-22; the second state is finite."""
    logits = tensor([[[0.0, logit], [0.0, 1.0]]], requires_grad=True)
    kl = exact_kl(logits, tensor([[[0.0, -INF], [0.0, 0.0]]]))
    assert kl[0, 0] == INF and kl[0, 1].isfinite()
    kl.sum().backward()
    assert (logits.grad[0, 0] == 0).all() and (logits.grad[0, 1] != 0).all()


def test_minus_infinity_is_the_logprob_of_probability_zero():
    two, three = tensor([[[0.5, 0.5, 0]]]).log(), tensor([[[0.25, 0.25, 0.5]]]).log()
    last = tensor([[[0, 0, 1.0]]]).log()
    cases = (two, three, LOG2), (two, two, 0), (three, two, INF), (two, last, INF)
    for policy, ref, expected in cases:
        logits = policy.clone().requires_grad_()
        logprobs = logits.log_softmax(-1)
        kl, entropy = F.kl_per_token(logprobs, ref), F.entropy_per_token(logprobs)
        (kl + entropy).sum().backward()
        assert kl.item() == pytest.approx(expected) and logits.grad.isfinite().all()
        assert entropy.item() == pytest.approx(LOG2 if policy is two else 1.5 * LOG2)
        assert F.kl_per_token(policy.half(), ref.half()).item() == pytest.approx(expected, 1e-3)


@pytest.mark.parametrize("policy_logit", [-INF, -800.0, -1e4])
@pytest.mark.parametrize("ref_logit", [-INF, -800.0, 0.5])
def test_gradients_match_differences_at_probability_zero(policy_logit, ref_logit):
    torch.manual_seed(1)
    logits, ref = (
        torch.randn(2, 3, 4, dtype=torch.float64).index_fill(-1, tensor([1]), z).requires_grad_()
        for z in (policy_logit, ref_logit)
    )
    assert torch.autograd.gradcheck(exact_kl, (logits, ref))
    # the same KL without the token, whose probability under the reference is q
    others, q = [x[..., [0, 2, 3]] for x in (logits, ref)], ref.softmax(-1)[..., 1]
    torch.testing.assert_close(exact_kl(logits, ref), exact_kl(*others) - torch.log1p(-q))


@pytest.mark.parametrize("garbage", [3e38, -3e38, INF, -INF])
def test_penalties_ignore_garbage_logits_at_masked_tokens(garbage):
    padding = torch.full((1, 2, 2), garbage)
    padding[0, 0, 1] = 0.0
    logits = torch.cat([HALF, QUARTER, padding], dim=1).requires_grad_()
    ref = torch.cat([QUARTER, HALF, padding.flip(1)], dim=1)
    mask = tensor([[True, True, False, False]])
    entropy = lambda: F.calc_entropy_bonus(F.entropy_per_token(F.log_probs(logits)), 2.0, mask)
    assert entropy().isfinite()
    for penalty in (
        F.calc_kl_penalty(exact_kl(logits, ref), 2.0, mask),
        F.calc_kl_penalty(exact_kl(ref, logits), 2.0, mask),
    ):
        assert penalty.item() == pytest.approx(FORWARD + BACKWARD)
        (grad,) = torch.autograd.grad(penalty, logits)
        assert grad.isfinite().all() and not grad[0, 2:].any() and grad[0, :2].all()
    (grad,) = torch.autograd.grad(entropy(), logits)
    assert grad.isfinite().all() and not grad[0, 2:].any()


def test_kl_of_later_states_matches_hand_computed():
    logprobs = tensor([[-1.0, -2.0, -4.0]], requires_grad=True)
    kl = tensor([[0.5, 0.25, 3.0]], requires_grad=True)
    got = F.kl_of_later_states(logprobs, kl)
    assert got.tolist() == [[-3.25, -6.0, 0.0]]
    got.sum().backward()
    assert kl.grad is None and logprobs.grad.tolist() == [[3.25, 3.0, 0.0]]
    hole = F.kl_of_later_states(logprobs, tensor([[0.5, NAN, 3.0]]), tensor([[True, False, True]]))
    assert hole.tolist() == [[-3.0, 0.0, 0.0]]
    assert F.kl_of_later_states(tensor([[-2.0]]), tensor([[7.0]])).tolist() == [[0.0]]


@pytest.mark.parametrize("seed", range(5))
def test_gradient_with_later_states_is_that_of_the_whole_kl(seed):
    """Two tokens of three choices each, so that every sequence can be listed."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    first, second, ref = normal(3).requires_grad_(), normal(3, 3).requires_grad_(), normal(3, 2, 3)
    ref[:, 0] = ref[0, 0].clone()
    p = first.softmax(0)
    # the definition: sum over sequences of p(x) log (p(x) / q(x))
    joint = p[:, None] * second.softmax(1)
    ref_joint = ref[0, 0].softmax(0)[:, None] * ref[:, 1].softmax(1)
    whole = (joint * (joint.log() - ref_joint.log())).sum()
    kl = exact_kl(torch.stack([first.expand(3, 3), second], 1), ref)
    logprobs = torch.stack([first.log_softmax(0), torch.zeros(3, dtype=torch.float64)], 1)
    weights = p.detach()[:, None]
    gradient = lambda x: torch.autograd.grad(x, (first, second), retain_graph=True)
    got = gradient((weights * (kl + F.kl_of_later_states(logprobs, kl))).sum())
    torch.testing.assert_close(got, gradient(whole))
    assert not torch.allclose(gradient((weights * kl).sum())[0], gradient(whole)[0], atol=1e-3)


def test_estimates_match_hand_computed():
    # d = log 2, then -log 2
    logprobs, ref = tensor([[0.5, 0.25]]).log(), tensor([[0.25, 0.5]]).log()
    expected = {
        "k1": [LOG2, -LOG2],
        "k2": [LOG2**2 / 2] * 2,
        "k3": [LOG2 - 0.5, 1 - LOG2],
        "abs": [LOG2] * 2,
        "mse": [LOG2**2 / 2] * 2,
        "k3_straight_through": [LOG2 - 0.5, 1 - LOG2],
    }
    assert set(expected) == set(F.KL_ESTIMATORS)
    for name, values in expected.items():
        assert F.kl_estimate(logprobs, ref, name)[0].tolist() == pytest.approx(values), name
    # ratio 2 to the old policy: 2 * log 2; ratio 1: -log 2
    weighted = F.kl_importance_weighted(logprobs, tensor([[0.25, 0.25]]).log(), ref)
    assert weighted[0].tolist() == pytest.approx([2 * LOG2, -LOG2])


def gradient_in_logits(estimate, logits, weights):
    """The gradient of an estimate averaged over every token, weighted as it is sampled."""
    leaf = logits.clone().requires_grad_()
    (weights * estimate(leaf.log_softmax(-1))).sum().backward()
    return leaf.grad


@seeds(30)
def test_estimates_are_unbiased_and_have_the_right_gradients(seed):
    logits, ref_logits, old_logits = (x[:1] for x in draw(seed, "bv", "bv", "bv"))
    pi, ref, old = (x.log_softmax(-1) for x in (logits, ref_logits, old_logits))
    kl = lambda logprobs: logprobs.exp() * (logprobs - ref)
    exact = kl(pi).sum().item()
    for name in ("k1", "k3"):
        assert (pi.exp() * F.kl_estimate(pi, ref, name)).sum().item() == pytest.approx(exact)
    assert (F.kl_estimate(pi, ref, "k3") >= 0).all()
    weighted = lambda logprobs: F.kl_importance_weighted(logprobs, old, ref)
    assert (old.exp() * weighted(pi)).sum().item() == pytest.approx(exact)
    slope = gradient_in_logits(kl, logits, 1.0)
    reverse = gradient_in_logits(lambda logprobs: ref.exp() * (ref - logprobs), logits, 1.0)
    for name, expected in (
        ("k1", torch.zeros_like(slope)), ("k2", slope), ("mse", slope), ("k3", reverse),
        ("k3_straight_through", slope),
    ):  # fmt: skip
        estimate = lambda logprobs, n=name: F.kl_estimate(logprobs, ref, n)
        torch.testing.assert_close(gradient_in_logits(estimate, logits, pi.exp()), expected)
    torch.testing.assert_close(gradient_in_logits(weighted, logits, old.exp()), slope)


def test_estimates_at_float32_extremes():
    gap = tensor([[80.0, -80.0, 1e4, 1e-4, -200.0]], requires_grad=True)
    zero = torch.zeros_like(gap)
    k3 = F.kl_estimate(gap, zero, "k3")
    # d = 1e-4: d^2 / 2; exp(200) is beyond float32
    assert k3[0].tolist() == pytest.approx([79.0, math.exp(80), 9999.0, 5e-9, INF], rel=1e-2)
    F.kl_straight_through(gap, zero).sum().backward()
    assert gap.grad[0].tolist() == gap[0].tolist()
    assert F.kl_importance_weighted(zero + 500, zero, zero).isfinite().all()
    assert F.kl_absolute(zero - 3e38, zero)[0, 0].item() == pytest.approx(3e38)
