"""Tests that the reference is a frozen, separate copy and that its residuals give its logits."""

import pytest
import torch

from rlhf_lab.models import final_residuals, frozen_copy, make_reference, unembed_residuals

TOKENS = torch.tensor([[4, 9, 13, 7, 20, 5], [12, 4, 19, 6, 8, 10]])


def all_hooks(model):
    return [
        hook for point in model.hook_dict.values() for hook in point.fwd_hooks + point.bwd_hooks
    ]


def test_the_weights_are_equal_but_their_storage_is_not_shared(policy):
    copied = dict(frozen_copy(policy.base_model).named_parameters())
    own = dict(policy.base_model.named_parameters())
    assert copied.keys() == own.keys()
    for name, parameter in own.items():
        assert torch.equal(copied[name], parameter), name
        assert copied[name].untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr()


def test_the_reference_is_frozen_and_in_eval_mode(policy):
    policy.train()
    reference = make_reference(policy)
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert not any(module.training for module in reference.modules())
    assert not final_residuals(reference, TOKENS).requires_grad


def test_the_original_stays_trainable_and_in_train_mode(policy):
    policy.train()
    before = [parameter.requires_grad for parameter in policy.base_model.parameters()]
    frozen_copy(policy.base_model)
    assert [parameter.requires_grad for parameter in policy.base_model.parameters()] == before
    assert policy.base_model.embed.W_E.requires_grad
    assert policy.base_model.training


@pytest.mark.parametrize("is_permanent", [False, True])
def test_hooks_stay_on_the_original_and_do_not_travel(policy, is_permanent):
    fired = []
    policy.base_model.add_hook(
        "blocks.0.hook_resid_post",
        lambda resid, hook: fired.append(resid.shape),
        is_permanent=is_permanent,
    )
    reference = frozen_copy(policy.base_model)
    assert all_hooks(reference) == []
    reference(TOKENS)
    assert fired == []
    policy(TOKENS)
    assert len(fired) == 1


def test_backward_hooks_do_not_travel(policy):
    policy.base_model.add_hook("blocks.0.hook_resid_post", lambda grad, hook: None, dir="bwd")
    assert all_hooks(frozen_copy(policy.base_model)) == []


def test_residuals_read_out_to_the_logits_of_the_forward_pass(policy):
    reference = frozen_copy(policy.base_model)
    residuals = final_residuals(reference, TOKENS)
    assert residuals.shape == (2, 6, 16)
    logits, _ = policy(TOKENS)
    torch.testing.assert_close(unembed_residuals(reference, residuals), logits, atol=1e-5, rtol=0)


def test_a_slice_of_the_residuals_reads_out_to_a_slice_of_the_logits(policy):
    reference = frozen_copy(policy.base_model)
    residuals = final_residuals(reference, TOKENS)[:, 2:-1]
    logits, _ = policy(TOKENS)
    torch.testing.assert_close(
        unembed_residuals(reference, residuals), logits[:, 2:-1], atol=1e-5, rtol=0
    )


def test_left_padded_rows_give_the_residuals_of_unpadded_rows(policy):
    reference = frozen_copy(policy.base_model)
    rows = torch.tensor([[0, 0, 13, 7, 20, 5], [12, 4, 19, 6, 8, 10]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]).bool()
    residuals = final_residuals(reference, rows, mask)
    alone = final_residuals(reference, rows[:1, 2:])
    torch.testing.assert_close(residuals[:1, 2:], alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        residuals[1:], final_residuals(reference, rows[1:]), atol=1e-5, rtol=0
    )


def test_padding_tokens_inside_a_sequence_are_not_masked(gpt2_dir, make_policy):
    """Token 0 is BOS, EOS and padding of this tokenizer, and here it is a word like any other."""
    reference = frozen_copy(make_policy(gpt2_dir).base_model)
    tokens = torch.tensor([[0, 0, 4, 8, 0, 0]])
    expected = unembed_residuals(reference, final_residuals(reference, tokens))
    reference.tokenizer.padding_side = "left"
    found = unembed_residuals(reference, final_residuals(reference, tokens))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_training_the_policy_leaves_the_reference_as_it_was(policy):
    reference = frozen_copy(policy.base_model)
    before = unembed_residuals(reference, final_residuals(reference, TOKENS))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    logits, values = policy(TOKENS)
    (logits.pow(2).mean() + values.pow(2).mean()).backward()
    optimizer.step()
    after = unembed_residuals(reference, final_residuals(reference, TOKENS))
    assert torch.equal(after, before)
    assert (policy(TOKENS)[0] - logits).abs().max() > 1e-2
    assert all(parameter.grad is None for parameter in reference.parameters())
