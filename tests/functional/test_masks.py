"""Masked sums, means, variances and the masks themselves."""

import inspect
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from rlhf_lab import functional
from rlhf_lab.functional import (
    at_least_float32,
    last_token_mask,
    masked_mean,
    masked_std,
    masked_var,
    response_mask,
    sequence_sum,
    truncate_at_stop,
    whiten,
    zero_masked,
)
from rlhf_lab.functional.masks import check_mask

NAN, INF = float("nan"), float("inf")
X = tensor([[1.0, 2.0, NAN], [4.0, INF, -INF]])
MASK = tensor([[True, True, False], [True, False, False]])

finite = st.floats(-1e3, 1e3, width=32)
masked_rows = st.integers(1, 4).flatmap(
    lambda gen: st.lists(
        st.tuples(
            st.lists(finite, min_size=gen, max_size=gen),
            st.lists(st.booleans(), min_size=gen, max_size=gen),
        ),
        min_size=1,
        max_size=4,
    )
)


def unpack(rows):
    x = tensor([values for values, _ in rows], dtype=torch.float64)
    return x, tensor([mask for _, mask in rows])


def test_masked_mean_by_hand():
    # (1 + 2 + 4) / 3
    assert masked_mean(X, MASK).item() == pytest.approx(7 / 3)
    # row 0: (1 + 2) / 2, row 1: 4 / 1
    assert masked_mean(X, MASK, dim=-1).tolist() == [1.5, 4.0]
    # without a mask: (1 + 2 + 3 + 6) / 4
    assert masked_mean(tensor([[1.0, 2.0], [3.0, 6.0]])).item() == 3.0


def test_masked_mean_divides_by_the_given_denominator():
    # (1 + 2 + 4) / 10
    for denominator in (10, 10.0, tensor(10)):
        assert masked_mean(X, MASK, denominator=denominator).item() == pytest.approx(0.7)


@given(masked_rows)
@settings(max_examples=40, deadline=None)
def test_micro_batches_add_up_to_the_minibatch(rows):
    x, mask = unpack(rows)
    tokens = int(mask.sum())
    parts = [masked_mean(x[i], mask[i], denominator=tokens) for i in range(len(x))]
    real = [v for values, keep in rows for v, k in zip(values, keep, strict=True) if k]
    expected = math.fsum(real) / len(real) if real else 0.0
    assert sum(parts).item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(masked_rows)
@settings(max_examples=40, deadline=None)
def test_masked_mean_and_var_equal_numpy_on_the_real_entries(rows):
    x, mask = unpack(rows)
    real = x.numpy()[mask.numpy()]
    mean = real.mean() if real.size else 0.0
    assert masked_mean(x, mask).item() == pytest.approx(mean, rel=1e-9, abs=1e-9)
    for unbiased in (False, True):
        var = np.var(real, ddof=int(unbiased)) if real.size > unbiased else 0.0
        got = masked_var(x, mask, unbiased=unbiased).item()
        assert got == pytest.approx(var, rel=1e-9, abs=1e-6)
    for row in range(len(x)):
        kept = x[row].numpy()[mask[row].numpy()]
        var = np.var(kept, ddof=1) if kept.size > 1 else 0.0
        assert masked_var(x, mask, dim=-1)[row].item() == pytest.approx(var, rel=1e-9, abs=1e-6)


def test_mean_over_nothing_is_zero_with_zero_gradient():
    x = tensor([[NAN, INF], [1.0, 2.0]], requires_grad=True)
    mask = tensor([[False, False], [True, True]])
    by_row = masked_mean(x, mask, dim=-1)
    assert by_row.tolist() == [0.0, 1.5]
    masked_mean(x, torch.zeros_like(mask)).backward()
    assert x.grad.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert masked_mean(torch.zeros(0, 3)).item() == 0.0
    assert masked_mean(x, torch.zeros_like(mask), denominator=0).item() == 0.0


def test_values_under_the_mask_reach_neither_value_nor_gradient():
    x = X.clone().requires_grad_()
    masked_mean(x, MASK).backward()
    third = 1 / 3
    assert x.grad.flatten().tolist() == pytest.approx([third, third, 0, third, 0, 0])
    x = X.clone().requires_grad_()
    (masked_var(x, MASK) + masked_std(x, MASK) + whiten(x, MASK).square().sum()).backward()
    assert x.grad.isfinite().all() and (x.grad[~MASK] == 0).all()


def test_zero_masked_stops_nan_before_exp_and_covers_trailing_axes():
    x = tensor([[[0.0, 1.0], [1e9, INF]]], requires_grad=True)
    zero_masked(x, tensor([[True, False]])).exp().sum().backward()
    # d exp(x) / dx = exp(x) at the real token, 0 under the mask
    assert x.grad.flatten().tolist() == pytest.approx([1.0, math.e, 0.0, 0.0])
    assert zero_masked(x, None) is x


def test_half_precision_is_summed_in_float32():
    # 100 * 1000 = 1e5 overflows float16 (largest: 65504); the mean is 1000
    x = torch.full((1, 100), 1000.0, dtype=torch.float16)
    assert masked_mean(x).item() == 1000.0
    # bfloat16 has steps of 2 above 256, and would turn 301 into 300 or 302
    assert sequence_sum(torch.ones(1, 301, dtype=torch.bfloat16)).tolist() == [301.0]
    assert masked_var(x).dtype == whiten(x).dtype == torch.float32
    assert at_least_float32(x.double()).dtype == torch.float64


def test_masked_var_by_hand():
    # mean 7/3; squares (16 + 1 + 25) / 9 = 42/9; / 2 unbiased, / 3 biased
    assert masked_var(X, MASK).item() == pytest.approx(42 / 18)
    assert masked_var(X, MASK, unbiased=False).item() == pytest.approx(42 / 27)
    # rows: var(1, 2) = 1/2; one element: 0
    assert masked_var(X, MASK, dim=-1).tolist() == [0.5, 0.0]


def test_std_of_one_element_is_zero_and_not_nan():
    one = tensor([3.0], requires_grad=True)
    for spread in (masked_var(one), masked_std(one), masked_var(one, tensor([False]))):
        assert spread.item() == 0.0
    (masked_var(one) + masked_std(one)).backward()
    assert one.grad.tolist() == [0.0]
    # var(1, 2, 4) = 42/18
    assert masked_std(X, MASK).item() == pytest.approx(math.sqrt(42 / 18))


def test_variance_keeps_its_digits_far_from_zero():
    # squares about the mean 1e4: (1 + 0 + 1) / 2 = 1; sum of squares minus square of sums gives 0
    assert masked_var(tensor([9999.0, 10000.0, 10001.0])).item() == 1.0


def test_whiten_by_hand_centers_by_default():
    # mean 2, var ((1-2)^2 + (3-2)^2) / 1 = 2
    x, mask = tensor([[1.0, 3.0, NAN]]), tensor([[True, True, False]])
    root = math.sqrt(2)
    assert whiten(x, mask).tolist() == [pytest.approx([-1 / root, 1 / root, 0.0])]


def test_whiten_without_shift_adds_the_mean_back():
    x, mask = tensor([[1.0, 3.0, NAN]]), tensor([[True, True, False]])
    root = math.sqrt(2)
    scaled = whiten(x, mask, shift_mean=False)
    assert scaled.tolist() == [pytest.approx([2 - 1 / root, 2 + 1 / root, 0.0])]
    assert masked_mean(scaled, mask).item() == pytest.approx(2.0)


def test_whiten_has_eps_inside_the_root():
    # var(0, 2) = 2, sqrt(2 + 2) = 2, so (0 - 1) / 2; outside the root it would be 1 / (1.41 + 2)
    assert whiten(tensor([0.0, 2.0]), eps=2.0).tolist() == [-0.5, 0.5]


@given(masked_rows.filter(lambda rows: sum(sum(m) for _, m in rows) >= 2))
@settings(max_examples=40, deadline=None)
def test_whitened_entries_have_mean_zero_and_their_order_is_kept(rows):
    x, mask = unpack(rows)
    real, white = x[mask].numpy(), whiten(x, mask)[mask].numpy()
    assert white.mean() == pytest.approx(0.0, abs=1e-6)
    var = real.var(ddof=1)
    assert white.var(ddof=1) == pytest.approx(var / (var + 1e-8), rel=1e-6, abs=1e-6)
    assert (np.diff(white[np.argsort(real, kind="stable")]) >= -1e-12).all()


@pytest.mark.parametrize("value", [0.1, 12.3, 100.1, 1000.1, 1e5, -1e30])
@pytest.mark.parametrize("shift_mean", [True, False])
def test_equal_entries_whiten_to_zero_although_their_mean_is_rounded(value, shift_mean):
    x, mask = torch.full((3, 7), value), torch.ones(3, 7, dtype=torch.bool)
    mask[1, 2:] = False
    spoiled = x.masked_fill(~mask, 5.0)
    expected = torch.zeros(3, 7) if shift_mean else torch.full((3, 7), value) * mask
    torch.testing.assert_close(whiten(spoiled, mask, shift_mean), expected, atol=0, rtol=2e-7)
    assert (whiten(x) == 0).all()


def test_one_token_or_none_whitens_to_zero():
    assert whiten(torch.zeros(0, 3)).shape == (0, 3)
    assert whiten(tensor([[5.0]])).tolist() == [[0.0]]
    assert whiten(tensor([[NAN, INF]]), tensor([[False, False]])).tolist() == [[0.0, 0.0]]


def test_gradients_of_the_statistics_agree_with_finite_differences():
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    mask = tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]]).bool()
    for function in (masked_mean, masked_var, masked_std, whiten, sequence_sum, zero_masked):
        assert torch.autograd.gradcheck(lambda v, f=function: f(v, mask), x)
    assert torch.autograd.gradcheck(lambda v: masked_var(v, dim=-1), x)


def test_sequence_sum_by_hand():
    assert sequence_sum(X, MASK).tolist() == [3.0, 4.0]
    assert sequence_sum(X, torch.zeros_like(MASK)).tolist() == [0.0, 0.0]
    assert sequence_sum(tensor([[1.5, 2.0]])).tolist() == [3.5]


def test_response_mask_ends_with_the_first_stop_token():
    tokens = tensor([[5, 9, 5, 9], [9, 9, 9, 9], [5, 6, 7, 9], [5, 6, 7, 8], [5, 0, 9, 1]])
    assert response_mask(tokens, [9, 0]).int().tolist() == [
        [1, 1, 0, 0],
        [1, 0, 0, 0],
        [1, 1, 1, 1],
        [1, 1, 1, 1],
        [1, 1, 0, 0],
    ]
    assert response_mask(tokens, []).all()


def test_truncate_keeps_the_stop_token_and_leaves_its_argument_alone():
    tokens = tensor([[5, 9, 5, 9], [5, 6, 7, 9]])
    before = tokens.clone()
    assert truncate_at_stop(tokens, (9,), pad_token=0).tolist() == [[5, 9, 0, 0], [5, 6, 7, 9]]
    assert torch.equal(tokens, before)
    # a pad token that is itself the stop token (GPT-2) stays distinguishable in the mask
    assert response_mask(tensor([[5, 9, 9]]), [9]).tolist() == [[True, True, False]]


@given(
    st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=4),
    st.sets(st.integers(0, 4), max_size=3),
)
@settings(max_examples=50, deadline=None)
def test_response_mask_and_truncation_equal_a_loop(rows, stops):
    expected, padded = [], []
    for row in rows:
        ends = [i for i, token in enumerate(row) if token in stops]
        length = ends[0] + 1 if ends else len(row)
        expected.append([i < length for i in range(len(row))])
        padded.append(row[:length] + [77] * (len(row) - length))
    assert response_mask(tensor(rows), sorted(stops)).tolist() == expected
    assert truncate_at_stop(tensor(rows), sorted(stops), 77).tolist() == padded


def test_the_last_token_is_marked_also_behind_holes_and_in_no_empty_row():
    mask = tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    assert last_token_mask(mask).int().tolist() == [
        [0, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 1],
        [1, 0, 0, 0],
        [0, 0, 0, 0],
    ]


NUMBERS, REWARDS = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)), torch.ones(2)
TAKES_A_MASK = {
    "zero_masked": lambda f, mask: f(NUMBERS, mask),
    "has_stop": lambda f, mask: f(torch.ones(2, 3, dtype=torch.long), [0], mask),
    "finished_mask": lambda f, mask: f(mask, torch.tensor([True, False])),
    "last_token_mask": lambda f, mask: f(mask),
    "position_ids": lambda f, mask: f(mask),
    "explained_variance": lambda f, mask: f(NUMBERS, NUMBERS.flip(0), mask),
    "opo_advantages": lambda f, mask: f(REWARDS, torch.zeros(2, dtype=torch.long), mask),
    "flawed_responses": lambda f, mask: f(mask, None, 1),
    "overlong_penalty": lambda f, mask: f(mask, 3, 2),
    "aggregation_denominator": lambda f, mask: f(mask),
}


@pytest.mark.parametrize("name", TAKES_A_MASK)
@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
def test_a_mask_of_numbers_is_refused_in_a_sentence(name, dtype):
    """A mask of 0 and 1 in whole numbers would be rows to take: explained_variance took them."""
    function = inspect.unwrap(getattr(functional, name))
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    with pytest.raises(ValueError, match=rf"mask has dtype {dtype}. Pass a boolean mask"):
        TAKES_A_MASK[name](function, mask.to(dtype))
    TAKES_A_MASK[name](function, mask.bool())


def test_wrong_masks_are_refused_with_a_sentence():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"\(3,\).*\(2,\)"):
        check_mask(x, torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="boolean"):
        check_mask(x, torch.ones(2, 3))
    with pytest.raises(ValueError, match="mask has shape .*expected"):
        inspect.unwrap(masked_mean)(x, torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match="denominator must .*got -1"):
        masked_mean(x, denominator=-1)
