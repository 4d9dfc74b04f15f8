"""Tests of the reference model: a frozen, separate copy, whose residuals give its logits."""

import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import (
    final_residuals,
    frozen_copy,
    has_hooks,
    make_reference,
    same_weights,
    unembed_residuals,
)
from rlhf_lab.models.lora import add_lora, lora_layers

TOKENS = torch.tensor([[4, 9, 13, 7, 20, 5], [12, 4, 19, 6, 8, 10]])


def test_frozen_copy_is_separate_frozen_and_unhooked(policy):
    model, name = policy.base_model.train(), "blocks.0.hook_resid_post"
    before, hook = [p.requires_grad for p in model.parameters()], lambda x, hook: None
    model.add_hook(name, hook, is_permanent=True)
    model.add_hook(name, hook, dir="bwd")
    reference = frozen_copy(model)
    weights, copied = dict(model.named_parameters()), dict(reference.named_parameters())
    assert weights.keys() == copied.keys() and same_weights(model, reference)
    assert {p.data_ptr() for p in copied.values()}.isdisjoint(
        p.data_ptr() for p in weights.values()
    )
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


def test_residuals_give_logits_of_unpadded_rows(policy):
    reference = frozen_copy(policy.base_model)
    mask = torch.tensor([[False] * 2 + [True] * 4, [True] * 6])
    residuals = final_residuals(reference, TOKENS, mask)
    assert residuals.shape == (2, 6, 16)
    for row, start in enumerate([2, 0]):
        logits = unembed_residuals(reference, residuals[row : row + 1, start:])
        expected = policy(TOKENS[row : row + 1, start:])[0]
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


def test_final_residuals_raises_on_a_replaced_forward(policy):
    policy.base_model.forward = lambda *inputs, **options: torch.zeros(())
    with pytest.raises(ConfigError, match="forward was replaced"):
        final_residuals(policy.base_model, TOKENS)


def test_make_reference_copies_adapters_that_are_not_new(policy):
    model = policy.base_model
    add_lora(model, 2, 1.0)
    assert not lora_layers(make_reference(policy))
    next(iter(lora_layers(model).values())).B.data += 1
    assert torch.equal(make_reference(model)(TOKENS), model(TOKENS))
