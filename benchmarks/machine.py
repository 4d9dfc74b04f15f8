"""Metadata of a measurement: processor, device and versions, without host names."""

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch


def describe(device: torch.device) -> dict[str, Any]:
    """Return processor, cores, memory, device and versions."""
    is_cuda = device.type == "cuda"
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformer_lens": version("transformer_lens"),
        "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
    }


def processor() -> str:
    """Return the model of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
