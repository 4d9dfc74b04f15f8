"""Tests of padding: rows are rotated so that it is on the right, and rotated back."""

import pytest
import torch

from rlhf_lab.models import policy_outputs
from rlhf_lab.models.padding import SURELY_READ, beginnings, pad_rows, rotate_padding
from rlhf_lab.models.padding import run_left_padded as run_padded

TOKENS = torch.tensor([[9, 9, 5, 6], [1, 2, 3, 4], [9, 7, 8, 3], [9, 9, 9, 2]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1]]).bool()
ON_THE_RIGHT = torch.tensor([[5, 6, 9, 9], [1, 2, 3, 4], [7, 8, 3, 9], [2, 9, 9, 9]])
BOTH_ENDS = torch.tensor([[False, True, False], [True, True, False]])
CPU = torch.device("cpu")


def test_pad_rows_and_rotation_match_hand_computed():
    rows = [[5, 6], [1, 2, 3, 4], [7, 8, 3], [2]]
    for side, expected, real in (("left", TOKENS, MASK), ("right", ON_THE_RIGHT, MASK.flip(1))):
        tokens, mask = pad_rows(rows, CPU, value=9, side=side)
        assert torch.equal(tokens, expected) and torch.equal(mask, real)
    assert torch.equal(rotate_padding(TOKENS, MASK, "right"), ON_THE_RIGHT)
    x = TOKENS[..., None, None] * torch.arange(6).view(2, 3)  # further axes move, too
    assert torch.equal(rotate_padding(x, MASK, "right")[..., 0, 1], ON_THE_RIGHT)
    assert torch.equal(rotate_padding(ON_THE_RIGHT, MASK, "left"), TOKENS)
    expected = torch.tensor([[5, 6, 9], [1, 2, 3]])  # only the padding on the left moves
    assert torch.equal(
        rotate_padding(torch.tensor([[9, 5, 6], [1, 2, 3]]), BOTH_ENDS, "right"), expected
    )


def test_run_gets_right_padded_rows_and_outputs_move_back():
    """The running sum of a causal model: 5, 5 + 6 in the first row, with any padding."""
    inputs = []

    def run(tokens):
        inputs.append(tokens)
        return tokens.cumsum(1), -tokens.cumsum(1)[..., None]

    sums, negated = run_padded(run, TOKENS, MASK)
    assert torch.equal(inputs[0], ON_THE_RIGHT)
    expected = torch.tensor([[0, 0, 5, 11], [1, 3, 6, 10], [0, 7, 15, 18], [0, 0, 0, 2]])
    assert torch.equal(sums[MASK], expected[MASK])
    assert torch.equal(negated[MASK][:, 0], -expected[MASK])
    for mask in (None, torch.ones_like(MASK)):  # without padding, the tokens are passed unchanged
        run_padded(run, TOKENS, mask)
        assert inputs[-1] is TOKENS


def test_gap_between_tokens_raises_with_its_row(policy):
    echo, tokens = lambda tokens: (tokens,), TOKENS[:2, :3]
    with pytest.raises(ValueError, match=r"attention_mask is False between .* in row 1"):
        run_padded(echo, tokens, torch.tensor([[True, True, True], [True, False, True]]))
    assert torch.equal(run_padded(echo, tokens, BOTH_ENDS)[0][BOTH_ENDS], tokens[BOTH_ENDS])
    mask = torch.tensor([[True, False, True]])
    for run in (policy, lambda *inputs: policy_outputs(policy, *inputs)):
        with pytest.raises(ValueError, match="row 0"):
            run(torch.tensor([[4, 9, 7]]), mask)


def test_beginnings_are_whole_words(gpt2_tokenizer):
    text = "w1 " * SURELY_READ
    short, long = beginnings(["w1 w2", text], gpt2_tokenizer, n_tokens=3)
    assert short == "w1 w2" and len(long) <= SURELY_READ < len(text)
    assert text.startswith(long) and long.endswith("w1")
