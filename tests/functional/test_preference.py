"""Losses on preference pairs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from rlhf_lab.functional import bradley_terry_loss, dpo_loss

number = st.floats(-20, 20, width=32)
pairs = st.lists(st.tuples(number, number, number, number), min_size=1, max_size=4)


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def test_bradley_terry_by_hand():
    # difference log 3: sigmoid = 3/4; difference 0: 1/2
    loss = bradley_terry_loss(tensor([math.log(3), 2.0]), tensor([0.0, 2.0]))
    assert loss.item() == pytest.approx((math.log(4 / 3) + math.log(2)) / 2)
    # a margin of log 3 turns the first pair into a tie
    one = bradley_terry_loss(tensor([math.log(3)]), tensor([0.0]), margin=math.log(3))
    assert one.item() == pytest.approx(math.log(2))
    each = bradley_terry_loss(tensor([math.log(3), 0.0]), torch.zeros(2), tensor([math.log(3), 0]))
    assert each.item() == pytest.approx(math.log(2))


@given(pairs, number)
@settings(max_examples=40, deadline=None)
def test_bradley_terry_equals_a_loop(rows, margin):
    chosen, rejected = (tensor([row[i] for row in rows], dtype=torch.float64) for i in (0, 1))
    expected = -sum(log_sigmoid(c - r - margin) for c, r, _, _ in rows) / len(rows)
    assert bradley_terry_loss(chosen, rejected, margin).item() == pytest.approx(expected, rel=1e-9)


def test_dpo_by_hand():
    # h = (-1 + 3) - (-2 + 2) = 2; beta h = log 3 with beta = log 3 / 2: -log 3/4
    args = (tensor([-1.0]), tensor([-3.0]), tensor([-2.0]), tensor([-2.0]))
    beta = math.log(3) / 2
    assert dpo_loss(*args, beta).item() == pytest.approx(math.log(4 / 3))
    # a tenth of the labels wrong: 0.9 * log 4/3 + 0.1 * log 4
    smooth = dpo_loss(*args, beta, label_smoothing=0.1).item()
    assert smooth == pytest.approx(0.9 * math.log(4 / 3) + 0.1 * math.log(4))
    # (2 - 1 / (2 * 0.5))^2
    assert dpo_loss(*args, 0.5, kind="ipo").item() == pytest.approx(1.0)


def test_dpo_at_the_reference_is_log_two():
    chosen, rejected = torch.randn(3), torch.randn(3)
    loss = dpo_loss(chosen, rejected, chosen, rejected, 0.1)
    assert loss.item() == pytest.approx(math.log(2))


@given(pairs, st.floats(0.05, 2), st.floats(0, 0.4))
@settings(max_examples=40, deadline=None)
def test_dpo_and_ipo_equal_a_loop(rows, beta, smoothing):
    columns = [tensor([row[i] for row in rows], dtype=torch.float64) for i in range(4)]
    hs = [(pc - pr) - (rc - rr) for pc, pr, rc, rr in rows]
    sigmoid = [
        -(1 - smoothing) * log_sigmoid(beta * h) - smoothing * log_sigmoid(-beta * h) for h in hs
    ]
    got = dpo_loss(*columns, beta, label_smoothing=smoothing).item()
    assert got == pytest.approx(sum(sigmoid) / len(hs), rel=1e-6)
    ipo = sum((h - 1 / (2 * beta)) ** 2 for h in hs) / len(hs)
    assert dpo_loss(*columns, beta, kind="ipo").item() == pytest.approx(ipo, rel=1e-9)


def test_extremes_of_float32_stay_finite_in_value_and_gradient():
    # exp(1e4) overflows; -log sigmoid(-1e4) is 1e4, and its slope is -1
    chosen = tensor([-1e4, 1e4], requires_grad=True)
    loss = bradley_terry_loss(chosen, torch.zeros(2))
    loss.backward()
    assert loss.item() == 5000.0 and chosen.grad.tolist() == [-0.5, 0.0]
    policy = tensor([-1e4], requires_grad=True)
    loss = dpo_loss(policy, torch.zeros(1), torch.zeros(1), torch.zeros(1), 1.0)
    loss.backward()
    assert loss.item() == 1e4 and policy.grad.tolist() == [-1.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_differences_are_taken_in_float32(dtype):
    # 2048 + 0.5 is 2048 in float16: the difference of differences must not round
    big = tensor([1024.0], dtype=dtype)
    one = tensor([0.5], dtype=dtype)
    # h = (1024 - 0.5) - (1024 - 0) = -0.5
    loss = dpo_loss(big, one, big, torch.zeros(1, dtype=dtype), 2.0)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(1 + math.e))
    assert bradley_terry_loss(big, big).dtype == torch.float32


def test_settings_without_meaning_are_refused():
    z = torch.zeros(1)
    for beta in (0.0, -0.1):
        with pytest.raises(ValueError, match="beta"):
            dpo_loss(z, z, z, z, beta)
    for smoothing in (-0.1, 0.5):
        with pytest.raises(ValueError, match="label_smoothing"):
            dpo_loss(z, z, z, z, 0.1, label_smoothing=smoothing)
    with pytest.raises(ValueError, match="ipo"):
        dpo_loss(z, z, z, z, 0.1, label_smoothing=0.1, kind="ipo")
    with pytest.raises(Exception, match="hinge"):
        dpo_loss(z, z, z, z, 0.1, kind="hinge")


def test_gradients_agree_with_finite_differences():
    torch.manual_seed(0)
    args = tuple(torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(4))
    check = torch.autograd.gradcheck
    assert check(lambda c, r: bradley_terry_loss(c, r, 0.3), args[:2])
    assert check(lambda *a: dpo_loss(*a, 0.3, label_smoothing=0.1), args)
    assert check(lambda *a: dpo_loss(*a, 0.3, kind="ipo"), args)
