"""PPO's clipped surrogate objective."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from rlhf_lab.functional import calc_clipped_surrogate_objective, clip_fraction, policy_ratio

NAN, INF = float("nan"), float("inf")


def objective_by_loop(logprobs, old, advantages, clip_coef, mask, normalize):
    """Equation 7 token by token in float64 python."""
    rows = zip(*(z[mask].tolist() for z in (logprobs, old, advantages)), strict=True)
    tokens = [(new, before, adv) for new, before, adv in rows]
    if not tokens:
        return 0.0
    scale, mean = 1.0, 0.0
    if normalize:
        column = np.array([adv for _, _, adv in tokens])
        mean = column.mean()
        scale = math.sqrt((column.var(ddof=1) if len(tokens) > 1 else 0.0) + 1e-8)
    total = 0.0
    for new, before, adv in tokens:
        ratio, adv = math.exp(new - before), (adv - mean) / scale
        clipped = max(1 - clip_coef, min(1 + clip_coef, ratio))
        total += min(ratio * adv, clipped * adv)
    return total / len(tokens)


def test_objective_by_hand_in_all_four_corners():
    # ratios 2, 2, 1/2, 1/2 with advantages 1, -1, 1, -1 and clip 0.2:
    # min(2, 1.2) = 1.2; min(-2, -1.2) = -2; min(.5, .8) = .5; min(-.5, -.8) = -.8; sum -1.1
    logprobs = torch.tensor([[2.0, 2.0, 0.5, 0.5]]).log()
    advantages = tensor([[1.0, -1.0, 1.0, -1.0]])
    objective = calc_clipped_surrogate_objective(
        logprobs, torch.zeros(1, 4), advantages, 0.2, normalize=False
    )
    assert objective.item() == pytest.approx(-1.1 / 4)


def test_clipping_stops_the_gradient_only_where_it_helps():
    logprobs = torch.tensor([[2.0, 2.0, 0.5, 0.5]]).log().requires_grad_()
    advantages = tensor([[1.0, -1.0, 1.0, -1.0]])
    calc_clipped_surrogate_objective(
        logprobs, torch.zeros(1, 4), advantages, 0.2, normalize=False
    ).backward()
    # d(ratio * A) / d logprob = ratio * A, over 4 tokens; the clipped corners are flat
    assert logprobs.grad[0].tolist() == pytest.approx([0.0, -0.5, 0.125, 0.0])


def test_normalized_objective_by_hand():
    # advantages 1, 3 whiten to -1/sqrt 2, 1/sqrt 2; ratios 1.1, 1.5 (clipped to 1.2)
    logprobs, old = tensor([[1.1, 1.5, NAN]]).log(), tensor([[0.0, 0.0, INF]])
    objective = calc_clipped_surrogate_objective(
        logprobs, old, tensor([[1.0, 3.0, NAN]]), 0.2, tensor([[True, True, False]])
    )
    assert objective.item() == pytest.approx((-1.1 + 1.2) / math.sqrt(2) / 2, rel=1e-5)


def test_at_ratio_one_the_objective_is_the_mean_advantage():
    logprobs = torch.randn(3, 4)
    advantages = tensor([[1.0] * 4, [2.0] * 4, [6.0] * 4])
    got = calc_clipped_surrogate_objective(logprobs, logprobs, advantages, 0.2, normalize=False)
    assert got.item() == pytest.approx(3.0)
    whitened = calc_clipped_surrogate_objective(logprobs, logprobs, advantages, 0.2)
    assert whitened.item() == pytest.approx(0.0, abs=1e-6)


@given(st.integers(0, 10_000), st.floats(0.05, 0.5), st.booleans())
@settings(max_examples=40, deadline=None)
def test_objective_equals_a_loop_over_tokens(seed, clip_coef, normalize):
    generator = torch.Generator().manual_seed(seed)
    logprobs, old, advantages = torch.randn(3, 2, 4, generator=generator, dtype=torch.float64)
    mask = torch.rand(2, 4, generator=generator) < 0.7
    got = calc_clipped_surrogate_objective(logprobs, old, advantages, clip_coef, mask, normalize)
    expected = objective_by_loop(logprobs, old, advantages, clip_coef, mask, normalize)
    assert got.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_one_token_normalizes_to_zero_and_not_nan():
    logprobs = tensor([[-1.0]], requires_grad=True)
    objective = calc_clipped_surrogate_objective(logprobs, tensor([[-1.2]]), tensor([[3.0]]), 0.2)
    objective.backward()
    assert objective.item() == 0.0 and logprobs.grad.tolist() == [[0.0]]


def test_all_masked_objective_is_zero():
    logprobs = torch.full((1, 2), NAN, requires_grad=True)
    nothing = torch.zeros(1, 2).bool()
    objective = calc_clipped_surrogate_objective(logprobs, logprobs, logprobs, 0.2, nothing)
    objective.backward()
    assert objective.item() == 0.0 and (logprobs.grad == 0).all()
    assert clip_fraction(logprobs, logprobs, 0.2, nothing).item() == 0.0


def test_objectives_of_micro_batches_add_up():
    torch.manual_seed(0)
    logprobs, old, advantages = torch.randn(3, 4, 3, dtype=torch.float64)
    mask = tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]]).bool()
    parts = [
        calc_clipped_surrogate_objective(
            logprobs[i : i + 1],
            old[i : i + 1],
            advantages[i : i + 1],
            0.2,
            mask[i : i + 1],
            normalize=False,
            denominator=tensor(6),
        )
        for i in range(4)
    ]
    expected = objective_by_loop(logprobs, old, advantages, 0.2, mask, normalize=False)
    assert sum(parts).item() == pytest.approx(expected, rel=1e-9)


def test_values_under_the_mask_reach_neither_value_nor_gradient():
    mask = tensor([[True, False, True, False]])
    for normalize in (False, True):
        inputs = [
            tensor([[0.1, NAN, -0.1, 1e30]], requires_grad=True),
            tensor([[0.0, INF, 0.0, -1e30]], requires_grad=True),
            tensor([[1.0, INF, -2.0, NAN]], requires_grad=True),
        ]
        objective = calc_clipped_surrogate_objective(*inputs, 0.2, mask, normalize)
        objective.backward()
        assert objective.isfinite()
        for given_tensor in inputs:
            assert given_tensor.grad.isfinite().all()
            assert (given_tensor.grad[~mask] == 0).all()


def test_eps_stands_inside_the_root_of_the_whitening():
    # advantages 0, 2 have variance 2, sqrt(2 + 2) = 2: -0.5, 0.5; ratios 1.1, 1
    logprobs = tensor([[1.1, 1.0]]).log()
    advantages = tensor([[0.0, 2.0]])
    got = calc_clipped_surrogate_objective(logprobs, torch.zeros(1, 2), advantages, 0.2, eps=2.0)
    assert got.item() == pytest.approx((-0.55 + 0.5) / 2)


def test_runaway_ratios_stay_finite_in_value_and_gradient():
    logprobs = tensor([[0.0, 0.0, 0.0, -500.0]], requires_grad=True)
    old = tensor([[-500.0, -500.0, -500.0, 0.0]])
    advantages = tensor([[1.0, -1.0, 0.0, 1.0]])
    ratio = policy_ratio(logprobs, old)
    # the log-ratio is limited to 20: exp(20) = 4.85e8; exp(-500) is 0 in float32
    assert ratio[0].tolist() == pytest.approx([math.exp(20)] * 3 + [0.0])
    objective = calc_clipped_surrogate_objective(logprobs, old, advantages, 0.2, normalize=False)
    # 1.2 - exp(20) + 0 + 0, over 4
    assert objective.item() == pytest.approx((1.2 - math.exp(20)) / 4)
    objective.backward()
    assert logprobs.grad.isfinite().all()


def test_ratio_and_clip_fraction_by_hand():
    logprobs, old = tensor([[0.5, 0.25, 0.55, NAN]]).log(), tensor([[0.5, 0.5, 0.5, 0.5]]).log()
    assert policy_ratio(logprobs, old)[0, :3].tolist() == pytest.approx([1.0, 0.5, 1.1])
    mask = tensor([[True, True, True, False]])
    # |r - 1| = 0, 0.5, 0.1: one of three beyond 0.2, two of three beyond 0.05
    assert clip_fraction(logprobs, old, 0.2, mask).item() == pytest.approx(1 / 3)
    assert clip_fraction(logprobs, old, 0.05, mask).item() == pytest.approx(2 / 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    # 200 advantages of 1000 sum to 2e5, beyond float16
    zeros = torch.zeros(1, 200, dtype=dtype)
    objective = calc_clipped_surrogate_objective(zeros, zeros, zeros + 1000, 0.2, normalize=False)
    assert objective.dtype == torch.float32 and objective.item() == 1000.0
    # exp(12) = 162754.79 is beyond float16
    assert policy_ratio(zeros + 12, zeros)[0, 0].item() == pytest.approx(math.exp(12), rel=1e-6)


def test_a_negative_clip_is_refused():
    z = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"clip_coef must .*got -0\.1"):
        calc_clipped_surrogate_objective(z, z, z, -0.1)


def test_gradients_agree_with_finite_differences():
    torch.manual_seed(0)
    logprobs, old, advantages = (
        torch.randn(2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)
    )
    mask = tensor([[1, 1, 0, 1], [0, 0, 0, 1]]).bool()
    assert torch.autograd.gradcheck(policy_ratio, (logprobs, old))
    for normalize in (False, True):
        assert torch.autograd.gradcheck(
            lambda new, before, adv, n=normalize: calc_clipped_surrogate_objective(
                new, before, adv, 0.2, mask, n
            ),
            (logprobs, old, advantages),
        )
