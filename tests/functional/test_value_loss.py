"""The regression loss of the value head."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from rlhf_lab.functional import calc_value_function_loss

NAN, INF = float("nan"), float("inf")


def loss_by_loop(values, returns, vf_coef, mask, old=None, clip=None):
    """The definition token by token in float64 python."""
    total, count = 0.0, 0
    for row, column in mask.nonzero().tolist():
        v, r = values[row, column].item(), returns[row, column].item()
        error = (v - r) ** 2
        if clip is not None:
            before = old[row, column].item()
            held = min(max(v, before - clip), before + clip)
            error = max(error, (held - r) ** 2)
        total, count = total + error, count + 1
    return 0.5 * vf_coef * total / count if count else 0.0


def test_loss_by_hand():
    # 1/2 * 0.15 * (1 + 4) / 2
    values, returns = tensor([[1.0, 2.0, NAN]]), tensor([[2.0, 0.0, INF]])
    mask = tensor([[True, True, False]])
    assert calc_value_function_loss(values, returns, 0.15, mask).item() == pytest.approx(0.1875)
    got = calc_value_function_loss(values, returns, 0.15, mask, denominator=10)
    # 1/2 * 0.15 * 5 / 10
    assert got.item() == pytest.approx(0.0375)


def test_clipped_loss_by_hand_takes_the_larger_error():
    values, old = tensor([[1.0, 1.0]]), tensor([[0.0, 0.0]])
    # return 1: errors 0 and (0.2 - 1)^2 = 0.64; return 0: errors 1 and 0.2^2 = 0.04
    loss = calc_value_function_loss(
        values, tensor([[1.0, 0.0]]), 1.0, old_values=old, clip=0.2
    ).item()
    assert loss == pytest.approx(0.5 * (0.64 + 1.0) / 2)


def test_clipped_loss_gives_no_gradient_to_a_value_that_moved_too_far_towards_its_return():
    values = tensor([[0.5, 0.1]], requires_grad=True)
    calc_value_function_loss(
        values, tensor([[1.0, 1.0]]), 2.0, old_values=tensor([[0.0, 0.0]]), clip=0.2
    ).backward()
    # token 0 is held at 0.2; token 1 moves freely: d/dv of (v - 1)^2 / 2 is -0.9
    assert values.grad[0].tolist() == pytest.approx([0.0, -0.9])


@given(st.integers(0, 10_000), st.sampled_from([None, 0.1, 0.5]))
@settings(max_examples=40, deadline=None)
def test_loss_equals_a_loop_over_tokens(seed, clip):
    generator = torch.Generator().manual_seed(seed)
    values, returns, old = torch.randn(3, 2, 4, generator=generator, dtype=torch.float64)
    mask = torch.rand(2, 4, generator=generator) < 0.7
    got = calc_value_function_loss(values, returns, 0.15, mask, old, clip).item()
    assert got == pytest.approx(loss_by_loop(values, returns, 0.15, mask, old, clip), rel=1e-9)


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_losses_of_micro_batches_add_up(seed):
    generator = torch.Generator().manual_seed(seed)
    values, returns = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 3, generator=generator) < 0.6
    tokens = int(mask.sum())
    parts = [
        calc_value_function_loss(
            values[i : i + 1], returns[i : i + 1], 0.15, mask[i : i + 1], denominator=tokens
        ).item()
        for i in range(4)
    ]
    assert sum(parts) == pytest.approx(loss_by_loop(values, returns, 0.15, mask), rel=1e-9)


def test_values_under_the_mask_reach_neither_value_nor_gradient():
    values = tensor([[1.0, NAN]], requires_grad=True)
    returns = tensor([[0.0, INF]], requires_grad=True)
    old = tensor([[0.95, NAN]], requires_grad=True)
    mask = tensor([[True, False]])
    loss = calc_value_function_loss(values, returns, 1.0, mask, old_values=old, clip=0.01)
    loss.backward()
    # held at 0.96: (1 - 0)^2 / 2 is larger, with slope 1 in the value and -1 in the return
    assert loss.item() == 0.5
    assert values.grad.tolist() == [[1.0, 0.0]]
    assert returns.grad.tolist() == [[-1.0, 0.0]]
    assert old.grad.tolist() == [[0.0, 0.0]]


def test_all_masked_loss_is_zero():
    values = torch.full((1, 2), NAN, requires_grad=True)
    loss = calc_value_function_loss(values, values.detach(), 1.0, torch.zeros(1, 2).bool())
    loss.backward()
    assert loss.item() == 0.0 and (values.grad == 0).all()


def test_one_token_of_one_sequence():
    assert calc_value_function_loss(tensor([[3.0]]), tensor([[1.0]]), 1.0).item() == 2.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_squared_in_float32(dtype):
    # 512^2 = 262144 is beyond float16
    values = torch.full((1, 1), 512.0, dtype=dtype)
    loss = calc_value_function_loss(values, torch.zeros_like(values), 1.0)
    assert loss.dtype == torch.float32 and loss.item() == 131072.0


def test_clipping_without_old_values_or_with_a_negative_clip_is_refused():
    z = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="old_values is missing"):
        calc_value_function_loss(z, z, 1.0, clip=0.2)
    with pytest.raises(ValueError, match=r"clip is -0\.2"):
        calc_value_function_loss(z, z, 1.0, old_values=z, clip=-0.2)


def test_gradients_agree_with_finite_differences():
    torch.manual_seed(0)
    values, returns, old = (
        torch.randn(2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)
    )
    mask = tensor([[1, 1, 0, 1], [0, 0, 0, 0]]).bool()
    check = torch.autograd.gradcheck
    assert check(lambda v, r: calc_value_function_loss(v, r, 0.3, mask), (values, returns))
    assert check(
        lambda v, r, o: calc_value_function_loss(v, r, 0.3, mask, o, 0.5), (values, returns, old)
    )
