"""Choosing a device by name, with a refusal where it is not there."""

import torch

from rlhf_lab.errors import ConfigError


def pick_device(name: str = "auto") -> torch.device:
    """The device that `name` asks for; auto is CUDA, else MPS, else the CPU.

    Raises:
        ConfigError: no such device on this machine.
    """
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name!r} is unknown; choose auto, cpu, cuda or mps.") from None
    there = {"cpu": True, "cuda": cuda, "mps": mps}
    if not there.get(device.type, False):
        raise ConfigError(f"device={name!r} is not available on this machine; choose auto or cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device={name!r} is not there: this machine has {torch.cuda.device_count()} of them."
        )
    return device
