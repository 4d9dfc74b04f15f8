"""Losses on preference pairs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from rlhf_lab.functional import (
    bradley_terry_loss,
    bradley_terry_token_loss,
    divergence_mask,
    dpo_loss,
    implicit_rewards,
    preference_accuracy,
    sft_loss,
)

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


def test_centring_by_hand():
    # log 2 at a tie, and 0.1 * (2 + 2)^2
    tie = tensor([2.0], requires_grad=True)
    loss = bradley_terry_loss(tie, tensor([2.0]), center_coef=0.1)
    assert loss.item() == pytest.approx(math.log(2) + 1.6)
    loss.backward()
    # -1/2 from the tie, 2 * 0.1 * 4 from the centring
    assert tie.grad.item() == pytest.approx(0.3)
    with pytest.raises(ValueError, match=r"center_coef must .*got -0\.1"):
        bradley_terry_loss(tie, tie, center_coef=-0.1)


@given(pairs, number, st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_centring_equals_a_loop(rows, margin, center_coef):
    chosen, rejected = (tensor([row[i] for row in rows], dtype=torch.float64) for i in (0, 1))
    expected = sum(center_coef * (c + r) ** 2 - log_sigmoid(c - r - margin) for c, r, _, _ in rows)
    got = bradley_terry_loss(chosen, rejected, margin, center_coef).item()
    assert got == pytest.approx(expected / len(rows), rel=1e-9)


def test_pairs_part_at_their_first_difference_by_hand():
    chosen = tensor([[1, 2, 3, 4], [1, 2, 0, 0], [1, 2, 0, 0], [1, 2, 9, 4]])
    rejected = tensor([[1, 5, 3, 0], [1, 2, 0, 0], [1, 2, 0, 0], [1, 2, 9, 5]])
    chosen_mask = tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]).bool()
    rejected_mask = tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    mask = divergence_mask(chosen, rejected, chosen_mask, rejected_mask)
    # the second pair is equal; in the third one goes on with a token that looks like padding
    assert mask.int().tolist() == [[0, 1, 1, 1], [0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=4), st.lists(st.integers(0, 2), max_size=4)),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=60, deadline=None)
def test_divergence_equals_a_loop_over_unpadded_pairs(rows):
    def padded(side):
        tokens = tensor([row[side] + [0] * (4 - len(row[side])) for row in rows])
        return tokens, tensor([[t < len(row[side]) for t in range(4)] for row in rows])

    (chosen, chosen_mask), (rejected, rejected_mask) = padded(0), padded(1)
    expected = []
    for one, other in rows:
        common = 0
        while common < min(len(one), len(other)) and one[common] == other[common]:
            common += 1
        expected.append([common <= t < max(len(one), len(other)) for t in range(4)])
    assert divergence_mask(chosen, rejected, chosen_mask, rejected_mask).tolist() == expected


def test_token_loss_by_hand():
    # pair 0: differences log 3 and 0: (log 4/3 + log 2) / 2; pair 1 has nothing; pair 2: log 2
    nan = float("nan")
    chosen = tensor([[nan, math.log(3), 1.0], [nan, nan, nan], [5.0, nan, nan]])
    rejected = tensor([[nan, 0.0, 1.0], [nan, nan, nan], [5.0, nan, nan]])
    mask = tensor([[0, 1, 1], [0, 0, 0], [1, 0, 0]]).bool()
    expected = ((math.log(4 / 3) + math.log(2)) / 2 + math.log(2)) / 2
    leaf = chosen.requires_grad_()
    loss = bradley_terry_token_loss(leaf, rejected, mask)
    assert loss.item() == pytest.approx(expected)
    loss.backward()
    # -sigmoid(-difference) / positions / pairs: 1/4 and 1/2 over 4, 1/2 over 2
    assert leaf.grad[mask].tolist() == pytest.approx([-1 / 16, -1 / 8, -1 / 4])
    assert (leaf.grad[~mask] == 0).all()
    assert bradley_terry_token_loss(chosen, rejected, torch.zeros_like(mask)).item() == 0.0


@given(pairs)
@settings(max_examples=20, deadline=None)
def test_token_loss_of_one_position_is_bradley_terry(rows):
    chosen, rejected = (tensor([row[i] for row in rows], dtype=torch.float64) for i in (0, 1))
    mask = torch.ones(len(rows), 1).bool()
    got = bradley_terry_token_loss(chosen[:, None], rejected[:, None], mask).item()
    assert got == pytest.approx(-sum(log_sigmoid(c - r) for c, r, _, _ in rows) / len(rows))


def test_accuracy_and_implicit_rewards_by_hand():
    # won, lost, tied
    accuracy = preference_accuracy(tensor([2.0, 1.0, 3.0]), tensor([1.0, 2.0, 3.0]))
    assert accuracy.item() == 0.5
    # won, lost, tied, won: (1 + 0 + 1/2 + 1) / 4
    gaps = tensor([0.1, -2.0, 0.0, 3.0])
    assert preference_accuracy(gaps, torch.zeros(4)).item() == 0.625
    got = implicit_rewards(tensor([-1.0, -4.0]), tensor([-3.0, -2.0]), 0.5)
    assert got.tolist() == [1.0, -1.0]
    with pytest.raises(ValueError, match=r"beta must .*got 0\.0"):
        implicit_rewards(tensor([0.0]), tensor([0.0]), 0.0)


@given(pairs, st.floats(0.05, 2))
@settings(max_examples=40, deadline=None)
def test_dpo_is_bradley_terry_on_implicit_rewards(rows, beta):
    columns = [tensor([row[i] for row in rows], dtype=torch.float64) for i in range(4)]
    chosen = implicit_rewards(columns[0], columns[2], beta)
    rejected = implicit_rewards(columns[1], columns[3], beta)
    expected = sum(
        -log_sigmoid(c - r) for c, r in zip(chosen.tolist(), rejected.tolist(), strict=True)
    )
    assert dpo_loss(*columns, beta).item() == pytest.approx(expected / len(rows), rel=1e-6)
    wins = [0.5 + 0.5 * ((c > r) - (c < r)) for c, r, _, _ in rows]
    assert preference_accuracy(columns[0], columns[1]).item() == pytest.approx(
        sum(wins) / len(wins)
    )


def test_sft_loss_by_hand():
    # (log 2 + log 4) / 2, or / 6 of a larger minibatch
    logprobs = tensor([[0.5, 0.25, float("nan")]]).log().requires_grad_()
    mask = tensor([[True, True, False]])
    assert sft_loss(logprobs, mask).item() == pytest.approx(1.5 * math.log(2))
    loss = sft_loss(logprobs, mask, denominator=6)
    assert loss.item() == pytest.approx(0.5 * math.log(2))
    loss.backward()
    assert logprobs.grad.flatten().tolist() == pytest.approx([-1 / 6, -1 / 6, 0])
    assert sft_loss(logprobs, torch.zeros_like(mask)).item() == 0.0


@given(pairs)
@settings(max_examples=20, deadline=None)
def test_sft_loss_equals_a_loop(rows):
    logprobs = tensor(rows, dtype=torch.float64)
    expected = -math.fsum(x for row in rows for x in row) / (4 * len(rows))
    assert sft_loss(logprobs).item() == pytest.approx(expected, abs=1e-9)


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
    assert bradley_terry_token_loss(big[None], big[None], tensor([[True]])).dtype == torch.float32
    # 1024 - 0.5 = 1023.5, which bfloat16 and float16 round
    assert implicit_rewards(big, one, 1.0).item() == 1023.5
    assert preference_accuracy(big, one).dtype == torch.float32
    # 100 * 1024 is beyond float16
    assert sft_loss(big.expand(1, 100)).item() == -1024.0


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


def test_a_batch_without_pairs_is_refused_and_not_nan():
    none = torch.zeros(0)
    for refused in (
        lambda: bradley_terry_loss(none, none),
        lambda: preference_accuracy(none, none),
        lambda: dpo_loss(none, none, none, none, 0.1),
    ):
        with pytest.raises(ValueError, match="at least one pair, got none"):
            refused()


def test_gradients_agree_with_finite_differences():
    torch.manual_seed(0)
    args = tuple(torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(4))
    check = torch.autograd.gradcheck
    assert check(lambda c, r: bradley_terry_loss(c, r, 0.3), args[:2])
    assert check(lambda *a: dpo_loss(*a, 0.3, label_smoothing=0.1), args)
    assert check(lambda *a: dpo_loss(*a, 0.3, kind="ipo"), args)
    assert check(lambda c, r: bradley_terry_loss(c, r, 0.3, 0.2), args[:2])
    assert check(lambda p, r: implicit_rewards(p, r, 0.3), args[:2])
    rows = torch.randn(2, 2, 3, dtype=torch.float64).requires_grad_()
    mask = tensor([[1, 1, 0], [0, 0, 0]]).bool()
    assert check(lambda x: bradley_terry_token_loss(*x, mask), rows)
    assert check(lambda x: sft_loss(x[0], mask), rows)
