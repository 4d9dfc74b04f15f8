"""Losses on judged texts and on the odds of pairs: KTO and ORPO."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from rlhf_lab.functional import (
    auc,
    kto_loss,
    kto_reference_point,
    log_odds,
    orpo_loss,
)

number = st.floats(-20, 20, width=32)
judged = st.lists(st.tuples(number, number, st.booleans()), min_size=1, max_size=5)
surprise = st.floats(1e-3, 30)


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def columns_of(rows):
    policy, ref = (tensor([row[i] for row in rows], dtype=torch.float64) for i in (0, 1))
    return policy, ref, tensor([row[2] for row in rows])


def test_kto_by_hand():
    # r = (2, -1); beta (r - z) = log 3 and -2 log 3 with z = 1 and beta = log 3
    policy, ref, is_good = tensor([-1.0, -4.0]), tensor([-3.0, -3.0]), tensor([True, True])
    beta = math.log(3)
    # 1 - 3/4, 1 - 1/10
    loss = kto_loss(policy, ref, is_good, 1.0, beta)
    assert loss.item() == pytest.approx((1 / 4 + 9 / 10) / 2)
    # of a bad text the value is what was missing before
    loss = kto_loss(policy, ref, tensor([False, True]), 1.0, beta, good_weight=2.0, bad_weight=0.5)
    assert loss.item() == pytest.approx((0.5 * 3 / 4 + 2 * 9 / 10) / 2)
    # at the reference, and with no KL, half of each value is missing
    assert kto_loss(ref, ref, is_good, 0.0, 0.1).item() == pytest.approx(0.5)
    one = kto_loss(policy[:1], ref[:1], is_good[:1], tensor(1.0), beta)
    assert one.shape == () and one.item() == pytest.approx(1 / 4)


@given(judged, st.floats(0, 5), st.floats(0.05, 2), st.floats(0, 3), st.floats(0, 3))
@settings(max_examples=60, deadline=None)
def test_kto_equals_the_papers_value_function_in_a_loop(rows, point, beta, good, bad):
    """lambda_y - v(x, y), as section 4 of the paper defines v, text by text."""
    missing = []
    for policy, ref, is_good in rows:
        weight, sign = (good, 1) if is_good else (bad, -1)
        value = weight * sigmoid(sign * beta * ((policy - ref) - point))
        missing.append(weight - value)
    got = kto_loss(*columns_of(rows), point, beta, good, bad).item()
    assert got == pytest.approx(sum(missing) / len(missing), rel=1e-9, abs=1e-12)


@given(judged, st.floats(0, 5), st.floats(0.05, 2))
@settings(max_examples=40, deadline=None)
def test_a_good_text_gains_what_a_bad_one_loses(rows, point, beta):
    """With both weights 1, turning all labels turns the loss around 1/2."""
    policy, ref, is_good = columns_of(rows)
    one = kto_loss(policy, ref, is_good, point, beta)
    other = kto_loss(policy, ref, ~is_good, point, beta)
    assert (one + other).item() == pytest.approx(1.0)


def test_the_reference_point_by_hand():
    # (2 - 1 + 5) / 3, and (1 - 4) / 2, which no KL is
    policy, ref = tensor([-1.0, -4.0, 0.0]), tensor([-3.0, -3.0, -5.0])
    assert kto_reference_point(policy, ref).item() == pytest.approx(2.0)
    assert kto_reference_point(tensor([1.0, -4.0]), torch.zeros(2)).item() == 0.0
    assert not kto_reference_point(policy.requires_grad_(), ref).requires_grad


@given(st.lists(st.lists(st.floats(0.05, 1), min_size=4, max_size=4), min_size=2, max_size=2))
@settings(max_examples=40, deadline=None)
def test_the_reference_point_of_all_outcomes_is_the_kl(weights):
    """Each outcome as often as the policy draws it: sum_y p(y) log p(y) / q(y)."""
    p, q = tensor(weights, dtype=torch.float64)
    counts = (p / p.sum() * 400).round().long().clamp(min=1)
    p, q = counts / counts.sum(), q / q.sum()
    rows = torch.arange(4).repeat_interleave(counts)
    expected = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    found = kto_reference_point(p.log()[rows], q.log()[rows]).item()
    assert found == pytest.approx(expected, abs=1e-6)


def test_log_odds_by_hand():
    # 1/2, 3/4, 1/4, and one in a million
    p = tensor([0.5, 0.75, 0.25, 1e-6], dtype=torch.float64)
    expected = [0.0, math.log(3), -math.log(3), math.log(1e-6 / (1 - 1e-6))]
    assert log_odds(p.log()).tolist() == pytest.approx(expected, abs=1e-12)


@given(st.lists(surprise, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_log_odds_are_those_of_the_probability_and_turn_around_its_rest(surprises):
    logp = -tensor(surprises, dtype=torch.float64)
    expected = [-x - math.log(-math.expm1(-x)) for x in surprises]
    assert log_odds(logp).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert log_odds(logp).sigmoid().tolist() == pytest.approx(logp.exp().tolist(), rel=1e-9)


def test_log_odds_keep_their_digits_on_both_sides_of_one_half():
    # 1 - exp(-1e-4) would keep 3 digits in float32; log(1 - exp(-30)) would be 0
    logp = tensor([-1e-4, -30.0])
    assert log_odds(logp)[0].item() == pytest.approx(-1e-4 - math.log(-math.expm1(-1e-4)), rel=1e-6)
    rest = (log_odds(logp.double()) - logp.double())[1].item()
    assert rest == pytest.approx(math.exp(-30), rel=1e-9)


def test_orpo_by_hand():
    # P(c) = 1/2, P(r) = 1/4: odds 1 and 1/3, ratio 3: log 2 + lambda * log 4/3
    chosen, rejected = tensor([0.5]).log(), tensor([0.25]).log()
    assert orpo_loss(chosen, rejected, 0.0).item() == pytest.approx(math.log(2))
    loss = orpo_loss(chosen, rejected, 0.3).item()
    assert loss == pytest.approx(math.log(2) + 0.3 * math.log(4 / 3))
    # two pairs, of which the second is the first turned round
    loss = orpo_loss(*(torch.cat(x) for x in ((chosen, rejected), (rejected, chosen))), 0.3).item()
    first, second = math.log(2) + 0.3 * math.log(4 / 3), math.log(4) + 0.3 * math.log(4)
    assert loss == pytest.approx((first + second) / 2)


@given(
    st.lists(st.tuples(surprise, surprise), min_size=1, max_size=4),
    st.floats(0, 2),
)
@settings(max_examples=60, deadline=None)
def test_orpo_equals_trls_formula_in_a_loop(rows, weight):
    """log odds = (c - r) - (log1p(-e^c) - log1p(-e^r)), and nll - lambda log sigmoid(log odds)."""
    losses = []
    for c, r in ((-a, -b) for a, b in rows):
        odds = (c - r) - (math.log1p(-math.exp(c)) - math.log1p(-math.exp(r)))
        losses.append(-c + weight * (max(-odds, 0) + math.log1p(math.exp(-abs(odds)))))
    chosen, rejected = -tensor(rows, dtype=torch.float64).T
    got = orpo_loss(chosen, rejected, weight).item()
    assert got == pytest.approx(sum(losses) / len(losses), rel=1e-9)


def test_the_gradient_of_the_odds_is_the_papers():
    """delta * (1 / (1 - P(c)) dlogP(c) - 1 / (1 - P(r)) dlogP(r)), delta = 1 / (1 + odds ratio)
    (Hong et al. 2024, equations 8 to 10).
    """
    both = tensor([0.6, 0.2], dtype=torch.float64).log().requires_grad_()
    orpo_loss(both[:1], both[1:], 1.0).backward()
    delta = 1 / (1 + (0.6 / 0.4) / (0.2 / 0.8))
    expected = [-1 - delta / 0.4, delta / 0.8]
    assert both.grad.tolist() == pytest.approx(expected)


def test_auc_by_hand():
    scores, labels = tensor([3.0, 1.0, 2.0, 1.0]), tensor([True, True, False, False])
    # 3 beats both; 1 loses to 2 and ties with 1
    assert auc(scores, labels).item() == pytest.approx((1 + 1 + 0 + 0.5) / 4)
    rows = torch.stack([scores, -scores])
    assert auc(rows, labels).tolist() == pytest.approx([0.625, 0.375])
    assert auc(scores, torch.ones(4).bool()).isnan()


def test_extremes_of_float32_stay_finite_in_value_and_gradient():
    policy = tensor([-1e4, 1e4], requires_grad=True)
    loss = kto_loss(policy, torch.zeros(2), tensor([True, False]), 1e3, 1.0)
    loss.backward()
    assert loss.item() == 1.0 and policy.grad.tolist() == [0.0, 0.0]
    for values in ([0.0, 0.0], [-0.0, -1e4], [-1e4, 0.0], [-1e-45, -1e-45], [-1e4, -1e4]):
        both = tensor(values, requires_grad=True)
        loss = orpo_loss(both[:1], both[1:], 1.0)
        loss.backward()
        assert loss.isfinite() and both.grad.isfinite().all(), values
    # certain of the rejected text: the odds are those of 1 - 2^-23, 23 log 2
    found = log_odds(torch.zeros(1)).item()
    assert found == pytest.approx(23 * math.log(2), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_taken_to_float32(dtype):
    big, one = tensor([1024.0], dtype=dtype), tensor([0.5], dtype=dtype)
    # 1024 - 0.5 rounds in both: the value of 0.5 more is another
    loss = kto_loss(big, one, tensor([True]), 1023.0, 1.0)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(1 - sigmoid(0.5))
    assert kto_reference_point(big, one).item() == 1023.5
    assert log_odds(-one).dtype == orpo_loss(-one, -one, 0.1).dtype == torch.float32
    logp = -math.log(4)
    assert log_odds(tensor([logp], dtype=dtype)).item() == pytest.approx(-math.log(3), abs=1e-2)


def test_settings_without_meaning_are_refused():
    z, label = torch.zeros(1), tensor([True])
    for beta in (0.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="beta"):
            kto_loss(z, z, label, 0.0, beta)
    for weight in (-0.1, math.nan):
        with pytest.raises(ValueError, match="good_weight"):
            kto_loss(z, z, label, 0.0, 0.1, good_weight=weight)
        with pytest.raises(ValueError, match="bad_weight"):
            kto_loss(z, z, label, 0.0, 0.1, bad_weight=weight)
        with pytest.raises(ValueError, match="odds_weight"):
            orpo_loss(z, z, weight)


def test_a_batch_of_nothing_is_refused_and_not_nan():
    none = torch.zeros(0)
    for refused, what in (
        (lambda: kto_loss(none, none, none.bool(), 0.0, 0.1), "response"),
        (lambda: kto_reference_point(none, none), "response"),
        (lambda: orpo_loss(none, none, 0.1), "pair"),
    ):
        with pytest.raises(ValueError, match=f"at least one {what}, got none"):
            refused()


def test_gradients_agree_with_finite_differences():
    torch.manual_seed(0)
    both = tuple(torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    labels = tensor([True, False, True, False])
    check = torch.autograd.gradcheck
    assert check(lambda p, r: kto_loss(p, r, labels, 0.4, 0.3, 1.5, 0.5), both)
    likely = tuple((x.detach().abs() + 0.05).requires_grad_() for x in both)
    assert check(lambda c, r: orpo_loss(-c, -r, 0.7), likely)
    assert check(lambda x: log_odds(-x), likely[:1])
