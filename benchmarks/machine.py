"""Metadata of a measurement: processor, device and versions, without host names."""

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch


def describe(device: torch.device) -> dict[str, Any]:
    """Processor, cores, memory, the device if it is another, and versions."""
    found = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformer_lens": version("transformer_lens"),
        "device": device.type,
    }
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
    return found


def processor() -> str:
    """The processor's model, as the system names it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or platform.machine()
