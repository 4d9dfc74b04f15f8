"""The part of the KL's gradient that leads to other states."""

import inspect

import pytest
import torch
from torch import tensor

from rlhf_lab.functional import kl_of_later_states, kl_per_token, log_probs


def test_each_token_is_charged_with_the_kl_behind_it() -> None:
    logprobs, kl = tensor([[-1.0, -2.0, -4.0]]), tensor([[0.5, 0.25, 3.0]])
    charged = kl_of_later_states(logprobs, kl)
    assert charged.tolist() == [[-3.25, -6.0, 0.0]]
    masked = kl_of_later_states(logprobs, kl, tensor([[True, True, False]]))
    assert masked.tolist() == [[-0.25, 0.0, 0.0]]
    hole = kl_of_later_states(
        logprobs, tensor([[0.5, torch.nan, 3.0]]), tensor([[True, False, True]])
    )
    assert hole.tolist() == [[-3.0, 0.0, 0.0]]
    one = kl_of_later_states(tensor([[-2.0]]), tensor([[7.0]]))
    assert one.tolist() == [[0.0]]


@pytest.mark.parametrize("seed", range(5))
def test_with_it_the_penaltys_gradient_is_that_of_the_whole_sequences_kl(seed: int) -> None:
    """Two words of three choices each, where every sequence can be listed."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(3, generator=generator, dtype=torch.float64).requires_grad_()
    second = torch.randn(3, 3, generator=generator, dtype=torch.float64).requires_grad_()
    ref = torch.randn(3, 2, 3, generator=generator, dtype=torch.float64)
    ref[:, 0] = ref[0, 0]
    p = first.softmax(0)
    # from the definition: sum over sequences of p(x) log (p(x) / q(x))
    joint = p[:, None] * second.softmax(1)
    ref_joint = ref[0, 0].softmax(0)[:, None] * ref[:, 1].softmax(1)
    whole = (joint * (joint.log() - ref_joint.log())).sum()
    logits = torch.stack([first.expand(3, 3), second], 1)
    kl = kl_per_token(log_probs(logits), log_probs(ref))
    assert torch.allclose((p * kl.sum(1)).sum(), whole)
    logprobs = torch.stack([first.log_softmax(0), torch.zeros(3, dtype=torch.float64)], 1)
    weights = p.detach()
    surrogate = (weights * (kl + kl_of_later_states(logprobs, kl)).sum(1)).sum()
    leaves = (first, second)
    got = torch.autograd.grad(surrogate, leaves, retain_graph=True)
    alone = torch.autograd.grad((weights * kl.sum(1)).sum(), leaves, retain_graph=True)
    expected = torch.autograd.grad(whole, leaves)
    assert all(torch.allclose(g, e, atol=1e-12) for g, e in zip(got, expected, strict=True))
    assert not torch.allclose(alone[0], expected[0], atol=1e-3)


def test_the_kl_is_a_number_and_shapes_are_refused() -> None:
    kl = tensor([[1.0, 2.0]]).requires_grad_()
    logprobs = tensor([[-1.0, -1.0]]).requires_grad_()
    kl_of_later_states(logprobs, kl).sum().backward()
    assert kl.grad is None and logprobs.grad.tolist() == [[2.0, 0.0]]
    without_checks = inspect.unwrap(kl_of_later_states)
    with pytest.raises(ValueError, match="shape"):
        without_checks(logprobs, tensor([[1.0]]))
