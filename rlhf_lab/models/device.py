"""Devices by name, their precision, and what MPS lacks: float64 and half-precision attention."""

import contextlib
from collections.abc import Iterator
from types import MappingProxyType

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from rlhf_lab.errors import ConfigError

MPS_TORCH = "2.13"  # each release of torch fixes MPS kernels; older ones are not tested here
# largest rounding error of a log-prob in nats; for TF32, ten times the measured error
LOGPROB_ROUNDING = MappingProxyType({"fp32": 1e-3, "tf32": 0.01, "bf16": 0.25})


def pick_device(name: str = "auto", setting: str = "device") -> torch.device:
    """Return the device of this name; "auto" is CUDA, MPS or the CPU, the first available."""
    n_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    available = ["cuda", *(f"cuda:{i}" for i in range(n_cuda))] if n_cuda else []
    available += ["mps", "mps:0"] if torch.backends.mps.is_available() else []
    available += ["cpu", "cpu:0"]
    name = available[0] if name == "auto" else name
    if name not in available:
        raise ConfigError(f"{setting}={name!r} is not available. Choose auto, cpu, cuda or mps.")
    device = torch.device(name)
    if device.type == "mps" and TorchVersion(torch.__version__) < MPS_TORCH:
        raise ConfigError(
            f"{setting}={name!r} needs torch {MPS_TORCH} or newer, and this is {torch.__version__}."
        )
    return device


def has_float64(device: torch.device) -> bool:
    """Return True if the device has float64 and all of linear algebra, which MPS does not."""
    return device.type in ("cpu", "cuda")


def where_exact(x: Tensor) -> Tensor:
    """Return x if its device has float64, else a copy on the CPU."""
    return x if has_float64(x.device) else x.cpu()


def exact(x: Tensor) -> Tensor:
    """Return x in float64, on its device or, if that lacks float64, on the CPU."""
    return where_exact(x).double()


def total_memory(device: torch.device) -> int | None:
    """Return the bytes of memory of a CUDA device; None for others, which share the host's."""
    is_cuda = device.type == "cuda"
    return torch.cuda.get_device_properties(device).total_memory if is_cuda else None


def product_dtype(precision: str) -> torch.dtype | None:
    """Return the dtype of matrix products; None for the dtype of the model."""
    return torch.bfloat16 if precision == "bf16" else None


def validate_half_precision(device: torch.device, dtype: torch.dtype | None, what: str) -> None:
    """Raise ConfigError for half precision on MPS, where causal attention is wrong."""
    if device.type == "mps" and dtype in (torch.bfloat16, torch.float16):
        raise ConfigError(
            f"{what} on device='mps' lets tokens attend to later ones (pytorch issue 195910): "
            "use fp32, or device='cpu'."
        )


def validate_tf32(device: torch.device, precision: str) -> None:
    """Raise ConfigError for precision="tf32" unless the device supports it."""
    is_ampere = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8
    if precision == "tf32" and not is_ampere:
        raise ConfigError(
            f"precision='tf32' on device={str(device)!r} has no effect: it requires a CUDA GPU of "
            "the Ampere generation or later. Set precision='fp32'."
        )


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Return a context in which matrix products use this dtype; without effect for None."""
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)


@contextlib.contextmanager
def tf32_products() -> Iterator[None]:
    """Multiply float32 matrices on CUDA with 10 bits of mantissa."""
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "tf32"
    try:
        yield
    finally:
        products.fp32_precision = before
