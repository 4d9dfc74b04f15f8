"""Moving padding from one side to the other, and the positions of real tokens."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from rlhf_lab.functional import finished_mask, has_stop, pad_left, pad_right, position_ids

ROWS = tensor([[7, 8, 0, 0], [0, 5, 0, 6], [1, 2, 3, 4], [9, 9, 9, 9]])
MASK = tensor([[1, 1, 0, 0], [0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()

masked_rows = st.integers(1, 5).flatmap(
    lambda seq: st.lists(
        st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=seq, max_size=seq),
        min_size=1,
        max_size=4,
    )
)


def test_padding_moves_left_and_right_by_hand():
    left, left_mask = pad_left(ROWS, MASK, fill=-1)
    assert left.tolist() == [[-1, -1, 7, 8], [-1, -1, 5, 6], [1, 2, 3, 4], [-1, -1, -1, -1]]
    assert left_mask.int().tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]]
    right, right_mask = pad_right(ROWS, MASK, fill=-1)
    assert right.tolist() == [[7, 8, -1, -1], [5, 6, -1, -1], [1, 2, 3, 4], [-1, -1, -1, -1]]
    assert right_mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]


def test_rows_become_longer_or_shorter_by_their_padding_alone():
    assert pad_left(ROWS[:3], MASK[:3], length=5)[0][0].tolist() == [0, 0, 0, 7, 8]
    assert pad_right(ROWS[:3], MASK[:3], length=5)[0][2].tolist() == [1, 2, 3, 4, 0]
    assert pad_left(ROWS[:2], MASK[:2], length=2)[0].tolist() == [[7, 8], [5, 6]]
    assert pad_right(ROWS[:2], MASK[:2], length=3)[1].int().tolist() == [[1, 1, 0], [1, 1, 0]]
    for move in (pad_left, pad_right):
        with pytest.raises(ValueError, match="length is 3 but a row has 4 real entries"):
            move(ROWS, MASK, length=3)


@given(masked_rows, st.integers(0, 2))
@settings(max_examples=50, deadline=None)
def test_moving_equals_a_loop_over_rows(rows, more):
    tokens = tensor([[token for token, _ in row] for row in rows])
    mask = tensor([[keep for _, keep in row] for row in rows])
    length = tokens.shape[1] + more
    real = [[token for token, keep in row if keep] for row in rows]
    left, left_mask = pad_left(tokens, mask, length=length)
    right, right_mask = pad_right(tokens, mask, length=length)
    assert left.tolist() == [[0] * (length - len(row)) + row for row in real]
    assert right.tolist() == [row + [0] * (length - len(row)) for row in real]
    assert torch.equal(left_mask, left != 0) and torch.equal(right_mask, right != 0)
    back, _ = pad_right(left, left_mask)
    assert torch.equal(back, right)


def test_whatever_has_one_entry_per_token_moves_with_its_gradient():
    x = torch.randn(4, 4, 2, dtype=torch.float64, requires_grad=True)
    left, _ = pad_left(x, MASK)
    assert torch.equal(left[1, 2], x[1, 1]) and torch.equal(left[1, 3], x[1, 3])
    assert torch.autograd.gradcheck(lambda v: pad_left(v, MASK, length=6)[0], x)
    assert torch.autograd.gradcheck(lambda v: pad_right(v, MASK)[0], x)
    nan = tensor([[float("nan"), 1.0]], requires_grad=True)
    pad_right(nan, tensor([[False, True]]))[0].sum().backward()
    assert nan.grad.tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.bfloat16, torch.float64])
def test_the_dtype_is_kept_and_the_argument_left_alone(dtype):
    x = ROWS.to(dtype)
    before = x.clone()
    assert pad_left(x, MASK)[0].dtype == pad_right(x, MASK)[0].dtype == dtype
    assert torch.equal(x, before)


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="mask has shape"):
        inspect.unwrap(pad_left)(ROWS, MASK[:2])
    with pytest.raises(ValueError, match="boolean"):
        inspect.unwrap(pad_right)(ROWS, MASK.long())


def test_positions_count_real_tokens_on_either_side_of_padding():
    mask = tensor([[0, 0, 1, 1], [1, 1, 0, 0], [1, 0, 1, 1], [0, 0, 0, 0]]).bool()
    assert position_ids(mask).tolist() == [[0, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 2], [0, 0, 0, 0]]
    assert position_ids(tensor([[True]])).tolist() == [[0]]


@given(masked_rows)
@settings(max_examples=30, deadline=None)
def test_positions_of_real_tokens_are_0_1_2(rows):
    mask = tensor([[keep for _, keep in row] for row in rows])
    for positions, keep in zip(position_ids(mask), mask, strict=True):
        assert positions[keep].tolist() == list(range(int(keep.sum())))
        assert (positions[~keep] == 0).all()


def test_a_stop_token_counts_in_the_last_slot_but_not_as_padding():
    # torchtune looks for padding instead, and so takes a stop in the last slot for none
    tokens = tensor([[5, 6, 9], [5, 6, 7], [9, 9, 9], [5, 3, 9]])
    mask = tensor([[1, 1, 1], [1, 1, 1], [1, 0, 0], [1, 1, 0]]).bool()
    assert has_stop(tokens, [9]).tolist() == [True, False, True, True]
    assert has_stop(tokens, [9], mask).tolist() == [True, False, True, False]
    assert has_stop(tokens, (9, 3, 7), mask).tolist() == [True, True, True, True]
    assert has_stop(tokens, []).tolist() == [False] * 4
    assert has_stop(tokens, [9], torch.zeros_like(mask)).tolist() == [False] * 4


@given(masked_rows, st.sets(st.integers(1, 9), max_size=3))
@settings(max_examples=40, deadline=None)
def test_stops_and_finished_rows_equal_a_loop(rows, stops):
    tokens = tensor([[token for token, _ in row] for row in rows])
    mask = tensor([[keep for _, keep in row] for row in rows])
    stopped = has_stop(tokens, sorted(stops), mask)
    assert stopped.tolist() == [any(k and t in stops for t, k in row) for row in rows]
    kept = finished_mask(mask, stopped)
    expected = [
        [k and done for _, k in row] for row, done in zip(rows, stopped.tolist(), strict=True)
    ]
    assert kept.tolist() == expected
