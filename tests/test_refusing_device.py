"""The stand-in for MPS: what it rejects and allows, and that numbers are the CPU's."""

import pytest
import torch
from torch import Tensor, nn

from tests.refusing_device import DEVICE, RefusingDevice


@pytest.fixture
def x():
    with RefusingDevice():
        yield torch.arange(6.0, device="mps").view(2, 3)


REFUSED = {
    "double": (lambda x: x.double(), TypeError, "support float64"),
    "moved as float64": (
        lambda x: torch.ones(2, dtype=torch.float64).to("mps"),
        TypeError,
        "support float64",
    ),
    "eigh": (lambda x: torch.linalg.eigh(x @ x.T), NotImplementedError, "_linalg_eigh"),
    "numpy": (lambda x: x.numpy(), TypeError, "to numpy"),
    "two devices": (lambda x: x + torch.ones(2, 3), RuntimeError, "same device"),
    "a module that stayed behind": (lambda x: nn.Linear(3, 2)(x), RuntimeError, "same device"),
    "the host's generator": (
        lambda x: x.clone().exponential_(generator=torch.Generator()),
        RuntimeError,
        "generator",
    ),
    "causal attention in bf16": (
        lambda x: nn.functional.scaled_dot_product_attention(
            *[x.bfloat16()[None, None]] * 3, is_causal=True
        ),
        RuntimeError,
        "later keys",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_device_rejects(x, what):
    run, error, words = REFUSED[what]
    with pytest.raises(error, match=words):
        run(x)


ALLOWED = {
    "the CPU first": lambda x: x.cpu().double().sum(),
    "a number of the host": lambda x: x * 2 + torch.tensor(0.5),
    "indices of the host": lambda x: x[:, torch.tensor([0, 2])],
    "copy": lambda x: torch.empty(2, 3).copy_(x),
    "read": lambda x: (x.sum().item(), x.tolist(), bool(x.any())),
}


@pytest.mark.parametrize("what", ALLOWED)
def test_device_allows_with_the_numbers_of_the_cpu(x, what):
    found, expected = ALLOWED[what](x), ALLOWED[what](torch.arange(6.0).view(2, 3))
    assert isinstance(found, tuple) or torch.equal(found.cpu(), expected)
    assert not isinstance(found, tuple) or found == expected


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


def test_gradients_cross_devices(x):
    start = torch.ones(2, 3, requires_grad=True)
    ((start.to("mps") * x).cpu() * 2).sum().backward()
    assert type(start.grad) is Tensor and torch.equal(start.grad, 2 * x.cpu())


READS = {
    "item": lambda x: x[0, 0].item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "index by a mask": lambda x: x[x > 0],
}


@pytest.mark.parametrize("kind", READS)
def test_reads_in_a_phase_are_rejected_except_in_named_functions(kind):
    with RefusingDevice(may_read=()) as device:
        x = torch.ones(2, 3, device="mps")
        READS[kind](x)
        with device.phase(), pytest.raises(RuntimeError, match="makes the host wait"):
            READS[kind](x)
    with RefusingDevice(may_read=("tests:tests",)) as device, device.phase():
        READS[kind](torch.ones(2, 3, device="mps"))
    assert device.reads.total() == 1 and not device.refused


def test_exit_restores_torch():
    before = torch.Generator, torch.backends.mps.is_available
    with RefusingDevice():
        assert torch.backends.mps.is_available() and torch.Generator is not before[0]
        assert torch.Generator("mps").device == DEVICE
        assert torch.Generator().device == torch.device("cpu")
    assert before == (torch.Generator, torch.backends.mps.is_available)
    assert not torch.__future__.get_swap_module_params_on_conversion()
    assert RefusingDevice.entered is None
