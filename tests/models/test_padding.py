"""Tests the rotation of left-padded rows against rows shifted one by one."""

import pytest
import torch

from rlhf_lab.models import policy_outputs
from rlhf_lab.models.padding import rotate_padding, run_left_padded

TOKENS = torch.tensor([[9, 9, 5, 6], [1, 2, 3, 4], [9, 7, 8, 3], [9, 9, 9, 2]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1]]).bool()
ON_THE_RIGHT = torch.tensor([[5, 6, 9, 9], [1, 2, 3, 4], [7, 8, 3, 9], [2, 9, 9, 9]])


def test_padding_moves_to_the_right_and_the_order_of_real_tokens_stays():
    assert torch.equal(rotate_padding(TOKENS, MASK, "right"), ON_THE_RIGHT)


def test_padding_moves_back_to_the_left():
    assert torch.equal(rotate_padding(ON_THE_RIGHT, MASK, "left"), TOKENS)


@pytest.mark.parametrize("shape", [(4, 4, 3), (4, 4, 2, 3)])
def test_further_axes_travel_with_their_position(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    moved = rotate_padding(x, MASK, "right")
    for row, n_pad in enumerate([2, 0, 1, 3]):
        assert torch.equal(moved[row], torch.cat([x[row, n_pad:], x[row, :n_pad]]))


def test_the_argument_is_not_changed():
    tokens, mask = TOKENS.clone(), MASK.clone()
    rotate_padding(tokens, mask, "right")
    assert torch.equal(tokens, TOKENS) and torch.equal(mask, MASK)


def test_gradients_reach_every_position_once():
    x = torch.randn(4, 4, 2, requires_grad=True)
    rotate_padding(x, MASK, "right")[:, 0].sum().backward()
    expected = torch.zeros(4, 4, 2)
    for row, first_real in enumerate([2, 0, 1, 3]):
        expected[row, first_real] = 1
    assert torch.equal(x.grad, expected)


def test_run_sees_right_padded_rows_and_its_outputs_come_back_on_the_left():
    """The running sum of a causal model: 5, 5+6 in the first row, whatever the padding holds."""
    seen = []

    def run(tokens):
        seen.append(tokens)
        return tokens.cumsum(1), -tokens.cumsum(1)[..., None]

    sums, negated = run_left_padded(run, TOKENS, MASK)
    assert torch.equal(seen[0], ON_THE_RIGHT)
    expected = torch.tensor([[0, 0, 5, 11], [1, 3, 6, 10], [0, 7, 15, 18], [0, 0, 0, 2]])
    assert torch.equal(sums[MASK], expected[MASK])
    assert torch.equal(negated[MASK][:, 0], -expected[MASK])


@pytest.mark.parametrize("mask", [None, torch.ones(4, 4, dtype=torch.bool)])
def test_rows_without_padding_are_handed_on_as_they_are(mask):
    seen = []

    def run(tokens):
        seen.append(tokens)
        return (tokens,)

    (output,) = run_left_padded(run, TOKENS, mask)
    assert seen[0] is TOKENS and output is TOKENS


def test_a_gap_between_real_tokens_is_refused_by_row():
    mask = torch.tensor([[True, True, True], [True, False, True]])
    with pytest.raises(ValueError, match=r"attention_mask is False between .* in row 1"):
        run_left_padded(lambda tokens: (tokens,), TOKENS[:2, :3], mask)


def test_padding_at_both_ends_is_no_gap():
    mask = torch.tensor([[False, True, False], [True, True, False]])
    (found,) = run_left_padded(lambda tokens: (tokens,), TOKENS[:2, :3], mask)
    assert torch.equal(found[mask], TOKENS[:2, :3][mask])


def test_a_policy_refuses_a_mask_with_a_gap(policy):
    tokens, mask = torch.tensor([[4, 9, 7]]), torch.tensor([[True, False, True]])
    with pytest.raises(ValueError, match="row 0"):
        policy(tokens, mask)
    with pytest.raises(ValueError, match="row 0"):
        policy_outputs(policy, tokens, mask)
