"""The stand-in for MPS: what it rejects and allows, and that its numbers are the CPU's."""

import pytest
import torch
from torch import nn

from tests.refusing_device import RefusingDevice


@pytest.fixture
def x():
    with RefusingDevice():
        yield torch.arange(6.0, device="mps").view(2, 3)


def causal_attention(x):
    inputs = [x.bfloat16()[None, None]] * 3
    return nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)


REJECTED = [
    (lambda x: x.double(), TypeError, "support float64"),
    (lambda x: torch.ones(2, dtype=torch.float64).to("mps"), TypeError, "support float64"),
    (lambda x: torch.linalg.eigh(x @ x.T), NotImplementedError, "_linalg_eigh"),
    (lambda x: x.numpy(), TypeError, "to numpy"),
    (lambda x: x + torch.ones(2, 3), RuntimeError, "same device"),
    (lambda x: nn.Linear(3, 2)(x), RuntimeError, "same device"),
    (lambda x: x.exponential_(generator=torch.Generator()), RuntimeError, "generator"),
    (causal_attention, RuntimeError, "later keys"),
]


@pytest.mark.parametrize(("run", "error", "words"), REJECTED)
def test_device_rejects(x, run, error, words):
    with pytest.raises(error, match=words):
        run(x)
