"""CPU tuning for the whole process: malloc thresholds and the faster route of matrix products.

It changes results by rounding only (1e-6).
"""

import ctypes
import platform
from pathlib import Path

import torch

from rlhf_lab.models.value_head import TransformerWithValueHead

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, KEEP_BYTES = -1, -3, 2**30
LARGEST_ERROR = 1e-6  # relative error of an exact float32 product
WIDE = 512
# torch.backends.mkldnn.matmul.fp32_precision; bfloat16 only on processors with matrix units for it
ROUTES = {"BLAS": "none", "oneDNN": "bf16"}


def tune_cpu(d_model: int) -> None:
    """Apply the settings for a model of this width; the same seed gives the same run."""
    keep_freed_memory()  # avoids page faults
    matmul, is_slow = torch.backends.mkldnn.matmul, d_model >= WIDE
    is_slow = is_slow and processor_vendor() == "AuthenticAMD"  # the default BLAS is slow there
    matmul.fp32_precision = ROUTES["oneDNN" if is_slow else "BLAS"]
    if matmul_error() > LARGEST_ERROR:
        matmul.fp32_precision = ROUTES["BLAS"]


def tune_for(policy: TransformerWithValueHead, enabled: bool) -> None:
    """Call `tune_cpu` if it is enabled and the policy is on the CPU."""
    if enabled and policy.device.type == "cpu":
        tune_cpu(policy.base_model.cfg.d_model)


def keep_freed_memory() -> None:
    """Raise glibc's thresholds for mapping and trimming memory; do nothing without glibc."""
    if platform.libc_ver()[0] == "glibc":
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            ctypes.CDLL(None).mallopt(option, KEEP_BYTES)


def processor_vendor() -> str:
    """Return the processor's vendor from /proc/cpuinfo, or ""."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")


def matmul_error(size: int = 384) -> float:
    """Return the relative error of a float32 matrix product against float64."""
    a, b = torch.randn(2, size, size, generator=torch.Generator().manual_seed(0))
    exact = a.double() @ b.double()
    return ((a @ b).double() - exact).norm().item() / exact.norm().item()
