"""Diagnostics of this machine: versions, devices against the CPU, and what can be reached."""

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import version

import torch
from huggingface_hub import HfApi
from rich.console import Console
from rich.table import Table

from rlhf_lab import __version__
from rlhf_lab.device_gaps import COMPARISONS, Compared
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.cpu_tuning import LARGEST_ERROR, WIDE, route_speedup, tune_cpu
from rlhf_lab.organism.bundled import BUNDLED, weights_dir
from rlhf_lab.organism.tokenizer import load_tokenizer

PACKAGES = ("torch", "transformer_lens", "transformers", "numpy", "wandb")


# what was looked at, what was found, and whether that is well; None where it is for information
Finding = tuple[str, str, bool | None]


def examine() -> int:
    """Print all findings; status 1 when one of them is wrong."""
    table = Table("what", "found", "", box=None)
    marks = {True: "ok", False: "WRONG", None: ""}
    is_well = True
    for subject, found, ok in _findings():
        table.add_row(subject, found, marks[ok])
        is_well &= ok is not False
    Console().print(table)
    return 0 if is_well else 1


def _findings() -> Iterator[Finding]:
    yield "python", platform.python_version(), None
    yield "rlhf_lab", __version__, None
    for package in PACKAGES:
        yield package, version(package), None
    yield "processor", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads", None
    yield _cpu_tuning()
    free = shutil.disk_usage(".").free / 1e9
    yield "disk", f"{free:.1f} GB free here", free > 1
    yield from _bundled()
    yield from _devices()
    yield _hub()
    yield _wandb()


def _cpu_tuning() -> Finding:
    tuning = tune_cpu(WIDE)
    memory = "freed memory is kept" if tuning.keeps_memory else "freed memory goes back"
    found = (
        f"fp32 products of wide models by {tuning.route} (error {tuning.error:.0e}; oneDNN is "
        f"{route_speedup():.2f} times as fast as BLAS), {memory}"
    )
    return "cpu settings", found, tuning.error <= LARGEST_ERROR


def _bundled() -> Iterator[Finding]:
    for name in BUNDLED:
        try:
            load_tokenizer(weights_dir(name))
            yield name, "bundled", True
        except (ValueError, OSError) as error:
            yield name, str(error), False


def _devices() -> Iterator[Finding]:
    """Compare every accelerator with the CPU in what training runs there."""
    others = [
        *(f"cuda:{i}" for i in range(torch.cuda.device_count())),
        *(["mps"] if torch.backends.mps.is_available() else []),
    ]
    if not others:
        yield "device", "cpu; there is no other to compare with it", None
    for name in others:
        yield from dict.fromkeys(_compared(name, compare) for compare in COMPARISONS)


def _compared(device: str, compare: Callable[[str], Compared]) -> Finding:
    """One comparison of a device with the CPU; what training refuses there is not wrong."""
    try:
        found = compare(device)
    except ConfigError as refusal:
        return device, str(refusal), None
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        return device, f"{compare.__name__} failed: {reason}", False
    return device, f"{found.what} by at most {found.gap:.1e}", found.ok


def _hub() -> Finding:
    try:
        HfApi().model_info("gpt2", timeout=3)
    except Exception as error:
        reason = type(error).__name__
        return "model hub", f"not reachable ({reason}); bundled and local models work", None
    return "model hub", "reachable", None


def _wandb() -> Finding:
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    logged_in = wandb.login(prompt=False, verify=False)
    found = "logged in" if logged_in else "not logged in; wandb_mode=offline works"
    return "wandb", found, None
