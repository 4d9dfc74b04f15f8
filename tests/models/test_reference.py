"""Tests of the reference model, a frozen copy, and of moving padding to the right."""

import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import frozen_copy, has_hooks, make_reference, padding
from rlhf_lab.models.hooked_model import final_residuals
from rlhf_lab.models.lora import add_lora, lora_layers, same_weights
from rlhf_lab.models.outputs import policy_outputs

TOKENS = torch.tensor([[4, 9, 13, 7, 20, 5], [12, 4, 19, 6, 8, 10]])
ROWS = torch.tensor([[9, 9, 5, 6], [1, 2, 3, 4], [9, 7, 8, 3], [9, 9, 9, 2]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1]]).bool()
ON_THE_RIGHT = torch.tensor([[5, 6, 9, 9], [1, 2, 3, 4], [7, 8, 3, 9], [2, 9, 9, 9]])
BOTH_ENDS = torch.tensor([[False, True, False], [True, True, False]])


def test_frozen_copy_is_separate_frozen_and_unhooked(policy):
    model, name = policy.base_model.train(), "blocks.0.hook_resid_post"
    before, hook = [p.requires_grad for p in model.parameters()], lambda x, hook: None
    model.add_hook(name, hook, is_permanent=True)
    model.add_hook(name, hook, dir="bwd")
    reference = frozen_copy(model)
    weights, copied = dict(model.named_parameters()), dict(reference.named_parameters())
    assert weights.keys() == copied.keys() and same_weights(model, reference)
    owned = {p.data_ptr() for p in weights.values()}
    assert owned.isdisjoint(p.data_ptr() for p in copied.values())
    assert not any(p.requires_grad for p in copied.values())
    assert not any(module.training for module in reference.modules())
    assert not has_hooks(reference) and not final_residuals(reference, TOKENS).requires_grad
    point = model.hook_dict[name]
    assert model.training and len(point.fwd_hooks) == len(point.bwd_hooks) == 1
    assert [p.requires_grad for p in model.parameters()] == before and any(before)
    for parameter in copied.values():  # each weight is compared
        kept, parameter.data = parameter.data, parameter.data + 1
        assert not same_weights(model, reference)
        parameter.data = kept


@pytest.mark.parametrize("change", ["replaced", "hooked"])
def test_residuals_raise_if_the_forward_of_the_model_is_changed(policy, change):
    model = policy.base_model
    if change == "hooked":
        model.register_forward_hook(lambda module, inputs, outputs: 2 * outputs)
    else:
        model.forward = lambda *inputs, **options: torch.zeros(())
    for run in (policy, lambda tokens: final_residuals(model, tokens)):
        with pytest.raises(ConfigError, match="forward was replaced or hooked"):
            run(TOKENS)


def test_make_reference_copies_adapters_that_are_not_new(policy):
    model = policy.base_model
    add_lora(model, 2, 1.0)
    assert not lora_layers(make_reference(policy))
    next(iter(lora_layers(model).values())).B.data += 1
    assert torch.equal(make_reference(model)(TOKENS), model(TOKENS))


def test_pad_rows_and_rotation_match_hand_computed():
    rows = [[5, 6], [1, 2, 3, 4], [7, 8, 3], [2]]
    for side, expected, real in (("left", ROWS, MASK), ("right", ON_THE_RIGHT, MASK.flip(1))):
        tokens, mask = padding.pad_rows(rows, TOKENS.device, value=9, side=side)
        assert torch.equal(tokens, expected) and torch.equal(mask, real)
    assert torch.equal(padding.rotate_padding(ROWS, MASK, "right"), ON_THE_RIGHT)
    x = ROWS[..., None, None] * torch.arange(6).view(2, 3)  # further axes move, too
    assert torch.equal(padding.rotate_padding(x, MASK, "right")[..., 0, 1], ON_THE_RIGHT)
    assert torch.equal(padding.rotate_padding(ON_THE_RIGHT, MASK, "left"), ROWS)
    tokens = torch.tensor([[9, 5, 6], [1, 2, 3]])  # only the padding on the left moves
    assert padding.rotate_padding(tokens, BOTH_ENDS, "right").tolist() == [[5, 6, 9], [1, 2, 3]]


def test_gap_between_tokens_raises_with_its_row(policy):
    echo, tokens = lambda tokens: (tokens,), ROWS[:2, :3]
    gap, run = torch.tensor([[True, True, True], [True, False, True]]), padding.run_left_padded
    with pytest.raises(ValueError, match=r"attention_mask is False between .* in row 1"):
        run(echo, tokens, gap)
    assert torch.equal(run(echo, tokens, BOTH_ENDS)[0][BOTH_ENDS], tokens[BOTH_ENDS])
    mask = torch.tensor([[True, False, True]])
    for run in (policy, lambda *inputs: policy_outputs(policy, *inputs)):
        with pytest.raises(ValueError, match="row 0"):
            run(torch.tensor([[4, 9, 7]]), mask)
