"""The stand-in for MPS: what it rejects and allows, and that its numbers are the CPU's."""

import pytest
import torch
from torch import Tensor, nn

from tests.refusing_device import DEVICE, RefusingDevice


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


def test_allowed_operations_have_the_numbers_of_the_cpu(x):
    for run in (
        lambda x: x.cpu().double().sum(),
        lambda x: x * 2 + torch.tensor(0.5),  # a number of the host
        lambda x: x[:, torch.tensor([0, 2])],  # indices of the host
        lambda x: torch.empty(2, 3).copy_(x),
    ):
        assert torch.equal(run(x).cpu(), run(torch.arange(6.0).view(2, 3)))
    assert (x.sum().item(), x[0].tolist(), bool(x.any())) == (15, [0, 1, 2], True)


def test_moved_module_trains_as_on_the_cpu(x):
    made = []
    for device in ("cpu", "mps"):
        torch.manual_seed(0)
        layer = nn.Linear(3, 2)
        before = layer.weight
        optimizer = torch.optim.AdamW(layer.to(device).parameters(), lr=0.1, fused=True)
        layer(x.to(device)).square().mean().backward()
        optimizer.step()
        assert layer.weight is before and layer.weight.device.type == device
        made.append(layer.weight.detach().cpu())
    assert torch.equal(*made)
    start = torch.ones(2, 3, requires_grad=True)
    ((start.to("mps") * x).cpu() * 2).sum().backward()
    assert type(start.grad) is Tensor and torch.equal(start.grad, 2 * x.cpu())


def test_exit_restores_torch():
    before = torch.Generator, torch.backends.mps.is_available
    with RefusingDevice():
        assert torch.backends.mps.is_available() and torch.Generator is not before[0]
        assert torch.Generator("mps").device == DEVICE
        assert torch.Generator().device == torch.device("cpu")
    assert before == (torch.Generator, torch.backends.mps.is_available)
    assert not torch.__future__.get_swap_module_params_on_conversion()
    assert RefusingDevice.entered is None
