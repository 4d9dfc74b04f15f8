"""KL from sampled tokens: TRL's absolute and squared forms, and estimates with the right slope."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from rlhf_lab.functional import (
    KL_ESTIMATORS,
    calc_sampled_kl_penalty,
    kl_absolute,
    kl_estimate,
    kl_importance_weighted,
    kl_straight_through,
)

NAN, INF = float("nan"), float("inf")
LOG2 = math.log(2)


def distributions(seed, n=3, d_vocab=6):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, 1, d_vocab, generator=generator, dtype=torch.float64)
    return logits.unbind()


def expected_slope(estimate, logits, weights):
    """The gradient in the logits of an estimate averaged over every token, weighted as sampled."""
    leaf = logits.clone().requires_grad_()
    (weights.detach() * estimate(leaf.log_softmax(-1))).sum().backward()
    return leaf.grad


def slope_of_exact_kl(logits, ref_logits, reverse=False):
    leaf = logits.clone().requires_grad_()
    pi, ref = leaf.log_softmax(-1), ref_logits.log_softmax(-1)
    kl = (ref.exp() * (ref - pi)).sum() if reverse else (pi.exp() * (pi - ref)).sum()
    kl.backward()
    return leaf.grad


def test_every_estimate_by_hand():
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
    assert set(expected) == set(KL_ESTIMATORS)
    for name, values in expected.items():
        assert kl_estimate(logprobs, ref, name)[0].tolist() == pytest.approx(values), name
    # ratio 2 to the old policy: 2 * log 2; ratio 1: -log 2
    weighted = kl_importance_weighted(logprobs, tensor([[0.25, 0.25]]).log(), ref)
    assert weighted[0].tolist() == pytest.approx([2 * LOG2, -LOG2])


def test_slopes_by_hand():
    # k3's own slope would be 1 - exp(-d) = 1/2; k2's is d
    logprobs = tensor([[math.log(0.5)]], requires_grad=True)
    kl_straight_through(logprobs, tensor([[math.log(0.25)]])).backward()
    assert logprobs.grad.item() == pytest.approx(LOG2)
    same = tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    kl_absolute(same, tensor([[-1.0, -1.0, -4.0]])).sum().backward()
    assert same.grad.tolist() == [[0.0, -1.0, 1.0]]


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_only_k2_and_straight_through_follow_the_slope_of_the_kl(seed):
    logits, ref_logits, _ = distributions(seed)
    pi, ref = logits.softmax(-1), ref_logits.log_softmax(-1)
    slope = {
        name: expected_slope(lambda lp, n=name: kl_estimate(lp, ref, n), logits, pi)
        for name in KL_ESTIMATORS
    }
    exact = slope_of_exact_kl(logits, ref_logits)
    for name in ("k2", "mse", "k3_straight_through"):
        torch.testing.assert_close(slope[name], exact)
    torch.testing.assert_close(slope["k1"], torch.zeros_like(exact))
    torch.testing.assert_close(slope["k3"], slope_of_exact_kl(logits, ref_logits, reverse=True))


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_importance_weights_make_value_and_slope_right_off_policy(seed):
    logits, ref_logits, old_logits = distributions(seed)
    ref, old = ref_logits.log_softmax(-1), old_logits.log_softmax(-1)
    estimate = lambda lp: kl_importance_weighted(lp, old, ref)
    torch.testing.assert_close(
        expected_slope(estimate, logits, old.exp()), slope_of_exact_kl(logits, ref_logits)
    )
    pi = logits.log_softmax(-1)
    value = (old.exp() * estimate(pi)).sum().item()
    assert value == pytest.approx((pi.exp() * (pi - ref)).sum().item(), rel=1e-9, abs=1e-12)


@given(st.integers(0, 10_000), st.sampled_from(sorted(KL_ESTIMATORS)))
@settings(max_examples=40, deadline=None)
def test_penalties_equal_a_loop_and_add_up_over_cuts(seed, name):
    generator = torch.Generator().manual_seed(seed)
    logprobs, ref = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 3, generator=generator) < 0.6
    formulas = {
        "k1": lambda d: d,
        "k2": lambda d: d * d / 2,
        "mse": lambda d: d * d / 2,
        "abs": abs,
    }
    formula = formulas.get(name, lambda d: math.exp(-d) - 1 + d)
    real = [formula(d) for d in (logprobs - ref)[mask].tolist()]
    expected = 0.3 * math.fsum(real) / max(len(real), 1)
    whole = calc_sampled_kl_penalty(logprobs, ref, name, 0.3, mask).item()
    assert whole == pytest.approx(expected, rel=1e-9, abs=1e-12)
    parts = [
        calc_sampled_kl_penalty(
            logprobs[part], ref[part], name, 0.3, mask[part], denominator=len(real)
        ).item()
        for part in (slice(0, 1), slice(1, 4))
    ]
    assert sum(parts) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_penalty_by_hand_in_each_aggregation():
    logprobs, ref = tensor([[2.0, 1.0, NAN], [5.0, NAN, INF]]), torch.zeros(2, 3)
    mask = tensor([[1, 1, 0], [1, 0, 0]]).bool()
    # k1: (2 + 1 + 5) / 3; (1.5 + 5) / 2; 8 / 6; times 0.6
    got = {
        way: calc_sampled_kl_penalty(logprobs, ref, "k1", 0.6, mask, aggregation=way).item()
        for way in ("token_mean", "sequence_mean", "constant")
    }
    assert got == pytest.approx({"token_mean": 1.6, "sequence_mean": 1.95, "constant": 0.8})


def test_an_estimator_of_ones_own_stands_where_a_name_does():
    cube = lambda logprobs, ref_logprobs: (logprobs - ref_logprobs) ** 3
    assert kl_estimate(tensor([[2.0]]), tensor([[0.0]]), cube).item() == 8.0
    in_order = lambda *both: both[0] - 2 * both[1]
    assert kl_estimate(tensor([[2.0]]), tensor([[0.5]]), in_order).item() == 1.0
    with pytest.raises(ValueError, match="Unknown kl_estimator 'k4'. Choose one of: k1, k2, k3"):
        kl_estimate(tensor([[2.0]]), tensor([[0.0]]), "k4")


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_masked_tokens_reach_neither_value_nor_gradient(name):
    logprobs = tensor([[-1.0, NAN, INF], [NAN, NAN, NAN]], requires_grad=True)
    ref = tensor([[-2.0, 0.0, NAN], [INF, -INF, NAN]])
    mask = tensor([[1, 0, 0], [0, 0, 0]]).bool()
    penalty = calc_sampled_kl_penalty(logprobs, ref, name, 1.0, mask)
    penalty.backward()
    assert penalty.isfinite() and logprobs.grad.isfinite().all()
    assert logprobs.grad[0, 0] != 0 and (logprobs.grad[~mask] == 0).all()


def test_float32_extremes_keep_a_finite_slope():
    logprobs = tensor([[-200.0, 80.0, 0.0]], requires_grad=True)
    kl = kl_straight_through(logprobs, tensor([[0.0, 0.0, 0.0]]))
    # exp(200) is beyond float32, and says so; its slope is d = -200
    assert kl[0, 0] == INF and kl[0, 1].item() == pytest.approx(79.0) and kl[0, 2] == 0
    kl.sum().backward()
    assert logprobs.grad.tolist() == [[-200.0, 80.0, 0.0]]
    zero = torch.zeros(1, 1)
    assert kl_importance_weighted(zero + 500, zero, zero).isfinite().all()
    assert kl_absolute(zero - 3e38, zero).item() == pytest.approx(3e38)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_half_precision_is_computed_in_float32(dtype, name):
    # 512^2 / 2 = 131072 and exp(12) are beyond float16
    d = -12.0 if name.startswith("k3") else 512.0
    got = kl_estimate(tensor([[d]], dtype=dtype), tensor([[0.0]], dtype=dtype), name)
    assert got.dtype == torch.float32 and got.isfinite().all()
    assert kl_importance_weighted(got.to(dtype), got.to(dtype), got.to(dtype)).dtype == got.dtype


def test_gradients_agree_with_finite_differences():
    torch.manual_seed(0)
    logprobs, ref, old = torch.randn(3, 2, 3, dtype=torch.float64).requires_grad_()
    mask = tensor([[1, 1, 0], [0, 0, 1]]).bool()
    check = torch.autograd.gradcheck
    assert check(kl_absolute, (logprobs, ref))
    assert check(kl_importance_weighted, (logprobs, old, ref))
    for name in ("k1", "k2", "k3", "abs", "mse"):
        penalty = lambda a, b, n=name: calc_sampled_kl_penalty(a, b, n, 0.7, mask)
        assert check(penalty, (logprobs, ref))
