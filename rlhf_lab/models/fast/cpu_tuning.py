"""CPU tuning: malloc thresholds, and the faster of two exact matrix-product routes.

Both belong to the whole process, change no result beyond rounding (1e-6), and are left alone where
they do not apply. The commands `train` and `resume` and the benchmarks ask for them, unless
`RLHFArgs.tune_cpu` is False; a trainer that is made from Python leaves the process as it is.
"""

import ctypes
import platform
import statistics
from pathlib import Path
from timeit import timeit
from typing import NamedTuple

import torch

from rlhf_lab.models.value_head import TransformerWithValueHead

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEEP_BYTES = 2**30
LARGEST_ERROR = 1e-6
WIDE = 512
ROUTES = {"BLAS": "none", "oneDNN": "bf16"}
"""The setting of `torch.backends.mkldnn.matmul.fp32_precision` for each route. "bf16" permits
oneDNN to use bfloat16 where the processor has matrix units for it; elsewhere it stays in fp32."""


class Tuning(NamedTuple):
    """What was set, and how exact it is.

    Args:
        keeps_memory: freed blocks stay with the process instead of going back to the system, where
            every large tensor would be page-faulted anew.
        route: of float32 matrix products, BLAS or oneDNN.
        error: of that route against float64, relative, in the Frobenius norm.
    """

    keeps_memory: bool
    route: str
    error: float


def tune_cpu(d_model: int) -> Tuning:
    """Set what pays on this processor for a model of this width, and check it.

    1. Tell glibc to keep freed memory.
    2. For wide models on AMD processors, where the default BLAS is slow, take oneDNN if it is
       exact: on processors with bfloat16 matrix units it is not, and the default stays. For narrow
       models it stays, too: oneDNN takes longer to begin than the product takes.

    Which route is taken follows from processor, width and check alone, never from a timing, so that
    the same seed gives the same run.
    """
    kept = keep_freed_memory()
    if d_model >= WIDE and processor_vendor() == "AuthenticAMD":
        set_route("oneDNN")
        error = matmul_error()
        if error <= LARGEST_ERROR:
            return Tuning(kept, "oneDNN", error)
    set_route("BLAS")
    return Tuning(kept, "BLAS", matmul_error())


def tune_for(policy: TransformerWithValueHead, wanted: bool) -> Tuning | None:
    """`tune_cpu` for a policy on the CPU; nothing elsewhere, or if `RLHFArgs.tune_cpu` is False."""
    if not wanted or policy.device.type != "cpu":
        return None
    return tune_cpu(policy.base_model.cfg.d_model)


def keep_freed_memory() -> bool:
    """Raise glibc's thresholds from which blocks are mapped and trimmed; False without glibc."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(option, KEEP_BYTES) for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD)])


def set_route(route: str) -> None:
    """Send float32 matrix products to "BLAS" or "oneDNN"."""
    torch.backends.mkldnn.matmul.fp32_precision = ROUTES[route]


def current_route() -> str:
    """Where float32 matrix products go now."""
    chosen = torch.backends.mkldnn.matmul.fp32_precision
    return "oneDNN" if chosen == ROUTES["oneDNN"] else "BLAS"


def processor_vendor() -> str:
    """The processor's vendor as Linux names it, "" where that is not known."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")


def matmul_error(size: int = 384) -> float:
    """The relative error of a float32 matrix product against float64."""
    a, b = torch.randn(2, size, size, generator=torch.Generator().manual_seed(0))
    exact = a.double() @ b.double()
    return ((a @ b).double() - exact).norm().item() / exact.norm().item()


def route_speedup(size: int = 768, repeats: int = 9) -> float:
    """How many times as fast oneDNN multiplies as the default BLAS, in turn, by medians."""
    a, b = torch.randn(2, size, size, generator=torch.Generator().manual_seed(0))
    before, times = current_route(), {route: [] for route in ROUTES}
    try:
        for _ in range(repeats):
            for route, seconds in times.items():
                set_route(route)
                seconds.append(timeit(lambda: a @ b, number=1))
    finally:
        set_route(before)
    medians = {route: statistics.median(seconds) for route, seconds in times.items()}
    return medians["BLAS"] / medians["oneDNN"]
