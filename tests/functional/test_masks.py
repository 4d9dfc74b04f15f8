"""Masks over generated tokens: stop tokens, padding and position ids."""

import inspect

import pytest
import torch
from torch import tensor

from rlhf_lab import functional as F
from rlhf_lab.functional.masks import check_mask

ROWS = tensor([[7, 8, 0, 0], [0, 5, 0, 6], [1, 2, 3, 4], [9, 9, 9, 9]])
MASK = tensor([[1, 1, 0, 0], [0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()


def test_response_mask_ends_with_the_first_stop_token():
    tokens = tensor([[5, 9, 5, 9], [9, 9, 9, 9], [5, 6, 7, 9], [5, 6, 7, 8], [5, 0, 9, 1]])
    lengths = tensor([2, 1, 4, 4, 2])
    assert torch.equal(F.response_mask(tokens, [9, 0]), torch.arange(4) < lengths[:, None])
    assert F.response_mask(tokens, []).all()


def test_truncate_at_stop_keeps_the_stop_token_and_its_input():
    tokens = tensor([[5, 9, 5, 9], [5, 6, 7, 9]])
    before = tokens.clone()
    assert F.truncate_at_stop(tokens, (9,), pad_token=0).tolist() == [[5, 9, 0, 0], [5, 6, 7, 9]]
    assert torch.equal(tokens, before)


def test_has_stop_counts_the_last_token_and_ignores_padding():
    # torchtune looks for padding instead, and misses a stop token in the last position
    tokens = tensor([[5, 6, 9], [5, 6, 7], [9, 9, 9], [5, 3, 9]])
    mask = tensor([[1, 1, 1], [1, 1, 1], [1, 0, 0], [1, 1, 0]]).bool()
    assert F.has_stop(tokens, [9]).tolist() == [True, False, True, True]
    assert F.has_stop(tokens, [9], mask).tolist() == [True, False, True, False]
    assert F.finished_mask(mask, F.has_stop(tokens, [9], mask)).int().tolist() == [
        [1, 1, 1], [0, 0, 0], [1, 0, 0], [0, 0, 0],
    ]  # fmt: skip
    assert not F.has_stop(tokens, []).any()
    assert not F.has_stop(tokens, [9], torch.zeros_like(mask)).any()


def test_last_token_mask_and_position_ids_match_hand_computed():
    mask = tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]]).bool()
    last = [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]]
    assert F.last_token_mask(mask).int().tolist() == last
    positions = [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]]
    assert F.position_ids(mask).tolist() == positions
    assert F.position_ids(tensor([[True]])).tolist() == [[0]]


def test_padding_matches_hand_computed():
    left, left_mask = F.pad_left(ROWS, MASK, fill=-1)
    assert left.tolist() == [[-1, -1, 7, 8], [-1, -1, 5, 6], [1, 2, 3, 4], [-1, -1, -1, -1]]
    right, right_mask = F.pad_right(ROWS, MASK, fill=-1)
    assert right.tolist() == [[7, 8, -1, -1], [5, 6, -1, -1], [1, 2, 3, 4], [-1, -1, -1, -1]]
    assert torch.equal(left_mask, left > 0) and torch.equal(right_mask, right > 0)
    assert F.pad_left(ROWS[:2], MASK[:2], length=2)[0].tolist() == [[7, 8], [5, 6]]
    for move in (F.pad_left, F.pad_right):
        with pytest.raises(ValueError, match="length=3 is below the 4 real entries"):
            move(ROWS, MASK, length=3)


def test_padding_moves_vectors_with_their_gradient():
    x = torch.randn(4, 4, 2, dtype=torch.float64, requires_grad=True)
    left, _ = F.pad_left(x, MASK)
    assert torch.equal(left[1, 2], x[1, 1]) and torch.equal(left[1, 3], x[1, 3])
    assert torch.autograd.gradcheck(lambda v: F.pad_left(v, MASK, length=6)[0], x)
    assert torch.autograd.gradcheck(lambda v: F.pad_right(v, MASK)[0], x)
    nan = tensor([[float("nan"), 1.0]], requires_grad=True)
    F.pad_right(nan, tensor([[False, True]]))[0].sum().backward()
    assert nan.grad.tolist() == [[0.0, 1.0]]


NUMBERS, IDS, TWO = torch.eye(3)[:2], torch.ones(2, 3, dtype=torch.long), torch.ones(2)
TAKES_A_MASK = {
    "zero_masked": lambda f, mask: f(NUMBERS, mask),
    "has_stop": lambda f, mask: f(IDS, [0], mask),
    "finished_mask": lambda f, mask: f(mask, tensor([True, False])),
    "last_token_mask": lambda f, mask: f(mask),
    "position_ids": lambda f, mask: f(mask),
    "pad_left": lambda f, mask: f(IDS, mask),
    "explained_variance": lambda f, mask: f(NUMBERS, NUMBERS.flip(0), mask),
    "opo_advantages": lambda f, mask: f(TWO, IDS[:, 0], mask),
    "flawed_responses": lambda f, mask: f(mask, None, 1),
    "overlong_penalty": lambda f, mask: f(mask, 3, 2),
    "aggregation_denominator": lambda f, mask: f(mask),
}


@pytest.mark.parametrize("name", TAKES_A_MASK)
@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
def test_masks_of_numbers_raise(name, dtype):
    """An integer mask would be indices: explained_variance once took rows 0 and 1."""
    function = inspect.unwrap(getattr(F, name))
    mask = tensor([[1, 1, 0], [1, 0, 0]])
    with pytest.raises(ValueError, match=rf"mask has dtype {dtype}. Pass a boolean mask"):
        TAKES_A_MASK[name](function, mask.to(dtype))
    TAKES_A_MASK[name](function, mask.bool())


def test_check_mask_raises_on_another_shape():
    with pytest.raises(ValueError, match=r"mask has shape \(3,\), expected \(2,\)"):
        check_mask(torch.zeros(2, 3), torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask has shape \(2,\), expected \(2, 3\)"):
        inspect.unwrap(F.masked_mean)(torch.zeros(2, 3), torch.ones(2, dtype=torch.bool))
    kl, mask = torch.zeros(3, 3), torch.ones(3, dtype=torch.bool)  # it could mask rows
    with pytest.raises(ValueError, match=r"mask has shape \(3,\), expected \(3, 3\)"):
        inspect.unwrap(F.masked_mean)(kl, mask, denominator=3)
