"""The refusing device itself: what it refuses, what it lets through, and that numbers are exact."""

import contextlib

import pytest
import torch
from torch import Tensor, nn

from tests.refusing_device import DEVICE, DeviceTensor, RefusingDevice


@pytest.fixture
def x():
    with RefusingDevice():
        yield torch.arange(6.0, device="mps").view(2, 3)


REFUSED = {
    "double": (lambda x: x.double(), TypeError, "support float64"),
    "to float64": (lambda x: x.to(torch.float64), TypeError, "support float64"),
    "moved as float64": (
        lambda x: torch.ones(2, dtype=torch.float64).to("mps"),
        TypeError,
        "support float64",
    ),
    "made as float64": (
        lambda x: torch.eye(2, dtype=torch.float64, device=x.device),
        TypeError,
        "support float64",
    ),
    "mean in float64": (lambda x: x.mean(dtype=torch.float64), TypeError, "support float64"),
    "eigh": (lambda x: torch.linalg.eigh(x @ x.T), NotImplementedError, "_linalg_eigh"),
    "numpy": (lambda x: x.numpy(), TypeError, "to numpy"),
    "two devices": (lambda x: x + torch.ones(2, 3), RuntimeError, "same device"),
    "the host's indices in gather": (
        lambda x: x.gather(1, torch.zeros(2, 1, dtype=torch.long)),
        RuntimeError,
        "same device",
    ),
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
def test_it_refuses(x, what):
    run, error, words = REFUSED[what]
    with pytest.raises(error, match=words):
        run(x)


@pytest.mark.parametrize("what", sorted(REFUSED.keys() - {"numpy"}))
def test_it_notes_what_it_would_refuse(what):
    with RefusingDevice(refuses=False) as device, contextlib.suppress(RuntimeError):
        REFUSED[what][0](torch.arange(6.0, device="mps").view(2, 3))
    assert device.refused.total()
    assert {place for _, place in device.refused} == {"tests:tests:0"}


ALLOWED = {
    "the CPU first": lambda x: x.cpu().double().sum(),
    "to the CPU first": lambda x: torch.linalg.eigh(x.to("cpu").double() @ x.cpu().double().T)[0],
    "a number of the host": lambda x: x * 2 + torch.tensor(0.5),
    "indices of the host": lambda x: x[:, torch.tensor([0, 2])],
    "copy": lambda x: torch.empty(2, 3).copy_(x),
    "copied to": lambda x: x.clone().copy_(torch.ones(2, 3)),
    "causal attention": lambda x: nn.functional.scaled_dot_product_attention(
        *[x[None, None]] * 3, is_causal=True
    ),
    "half precision": lambda x: (x.bfloat16() @ x.bfloat16().T).float(),
    "a kernel that MPS has": lambda x: torch.linalg.cholesky(x.T @ x + torch.eye(3).to(x)),
    "read": lambda x: (x.sum().item(), x.tolist(), bool(x.any())),
}


@pytest.mark.parametrize("what", ALLOWED)
def test_it_allows_with_the_numbers_of_the_cpu(x, what):
    found, expected = ALLOWED[what](x), ALLOWED[what](torch.arange(6.0).view(2, 3))
    assert isinstance(found, tuple) or torch.equal(found.cpu(), expected)
    assert not isinstance(found, tuple) or found == expected


def test_what_is_made_of_its_tensors_stays_on_it(x):
    weight = nn.Parameter(x)
    views = x[0], x.T, torch.zeros_like(x), x.new_tensor([1, 2]), x.detach(), weight, weight.data
    assert {made.device for made in views} == {DEVICE}
    (weight * x).sum().backward()
    assert isinstance(weight.grad, DeviceTensor) and torch.equal(weight.grad.cpu(), x.cpu())


def test_a_moved_module_keeps_its_parameters_and_learns_as_on_the_cpu(x):
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


def test_gradients_cross_from_device_to_host_and_back(x):
    start = torch.ones(2, 3, requires_grad=True)
    ((start.to("mps") * x).cpu() * 2).sum().backward()
    assert type(start.grad) is Tensor and torch.equal(start.grad, 2 * x.cpu())


READS = {
    "item": lambda x: x[0, 0].item(),
    "if": lambda x: bool(x[0, 0] > 0),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "copy": lambda x: torch.empty(2, 3).copy_(x),
    "index by a mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "equal": lambda x: torch.equal(x, x),
    "unique": lambda x: x.unique(),
}


@pytest.mark.parametrize("kind", READS)
def test_within_a_phase_it_refuses_to_be_read_but_in_the_places_given(kind):
    with RefusingDevice(may_read=()) as device:
        x = torch.ones(2, 3, device="mps")
        READS[kind](x)
        with device.phase(), pytest.raises(RuntimeError, match="makes the host wait"):
            READS[kind](x)
    with RefusingDevice(may_read=("tests:tests",)) as device, device.phase():
        READS[kind](torch.ones(2, 3, device="mps"))
    assert device.reads.total() == 1 and not device.refused


def test_it_leaves_nothing_behind():
    before = torch.Generator, torch.backends.mps.is_available
    with RefusingDevice():
        assert torch.backends.mps.is_available() and torch.Generator is not before[0]
        assert torch.Generator("mps").device == DEVICE
        assert torch.Generator().device == torch.device("cpu")
    assert before == (torch.Generator, torch.backends.mps.is_available)
    assert not torch.__future__.get_swap_module_params_on_conversion()
    assert RefusingDevice.entered is None
