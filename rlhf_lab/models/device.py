"""Device selection by name, and what MPS lacks: float64, and right attention in half precision."""

import contextlib
from collections.abc import Iterator
from types import MappingProxyType

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from rlhf_lab.errors import ConfigError

MPS_TORCH = "2.13"
"""The oldest torch whose MPS is allowed: each release corrects kernels that gave wrong numbers."""
LOGPROB_ROUNDING = MappingProxyType({"fp32": 1e-3, "tf32": 0.01, "bf16": 0.25})
"""How far rounding may take a log-probability from that of another path, in nats, and so the ratio
from 1, by the format of matrix products. TF32's is ten times what was seen where the factors of
products were rounded to it on a CPU, at the widths 64, 128 and 768."""


def pick_device(name: str = "auto") -> torch.device:
    """The device that `name` asks for; auto is CUDA, else MPS, else the CPU.

    Raises:
        ConfigError: no such device on this machine, or MPS with a torch that is too old for it.
    """
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto" and (cuda or not mps):
        return torch.device("cuda" if cuda else "cpu")
    name = "mps" if name == "auto" else name
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name!r} is unknown; choose auto, cpu, cuda or mps.") from None
    there = {"cpu": True, "cuda": cuda, "mps": mps}
    if not there.get(device.type, False):
        raise ConfigError(f"device={name!r} is not available on this machine; choose auto or cpu.")
    if device.type != "cuda" and device.index:
        raise ConfigError(f"device={name!r} is not there; choose {device.type}, which is one.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device={name!r} is not there: this machine has {torch.cuda.device_count()} of them."
        )
    if device.type == "mps" and TorchVersion(torch.__version__) < MPS_TORCH:
        raise ConfigError(
            f"device={name!r} needs torch {MPS_TORCH} or newer, since older kernels are not tested "
            f"here, and this is {torch.__version__}; install a newer one, or choose cpu."
        )
    return device


def has_float64(device: torch.device) -> bool:
    """Whether there is float64, and all of linear algebra; MPS also lacks `torch.linalg.eigh`."""
    return device.type in ("cpu", "cuda")


def where_exact(x: Tensor) -> Tensor:
    """x itself where its device has float64; else its copy on the CPU."""
    return x if has_float64(x.device) else x.cpu()


def exact(x: Tensor) -> Tensor:
    """x in float64: on its own device, or on the CPU where the device has none."""
    return where_exact(x).double()


def total_memory(device: torch.device) -> int | None:
    """Bytes of memory of a GPU; None for a device that shares the host's."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).total_memory


def product_dtype(precision: str) -> torch.dtype | None:
    """What matrix products read: bfloat16 for "bf16", the model's own dtype (None) for others."""
    return torch.bfloat16 if precision == "bf16" else None


def refuse_half_precision(device: torch.device, dtype: torch.dtype | None, what: str) -> None:
    """Refuse products in half precision on MPS, where causal attention is wrong in it.

    Raises:
        ConfigError: they are asked for there, by `what`.
    """
    if device.type == "mps" and dtype in (torch.bfloat16, torch.float16):
        raise ConfigError(
            f"{what} on device='mps' lets tokens attend to later ones (pytorch issue 195910); "
            "use fp32, or device='cpu'."
        )


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Let the hooked modules do their matrix products in this dtype; nothing changes for None."""
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)


def refuse_tf32(device: torch.device, precision: str) -> None:
    """Refuse TF32 where there is none.

    Raises:
        ConfigError: precision="tf32" elsewhere than on a CUDA GPU of compute capability 8 or more.
    """
    if precision != "tf32":
        return
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 8:
        raise ConfigError(
            f"precision='tf32' on device={str(device)!r} has no effect: only CUDA GPUs from Ampere "
            "on multiply in TF32; set it to 'fp32'."
        )


@contextlib.contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Within, CUDA multiplies float32 matrices in this precision.

    "tf32" rounds what is multiplied to 10 bits of mantissa and adds up in float32; any other is
    float32 itself. The setting is one of the whole process; the one before comes back at the end.
    """
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    try:
        yield
    finally:
        products.fp32_precision = before
