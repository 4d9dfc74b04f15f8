"""Environment of torchrun: the number of processes, and which of them this is.

Ranks count only if WORLD_SIZE is above 1, so variables left over from another program are ignored.
"""

import os

from rlhf_lab.errors import ConfigError


def n_processes() -> int:
    """Return how many processes torchrun started; 1 without torchrun."""
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if size.isdecimal() and int(size) else 1


def is_launched() -> bool:
    """Return True if torchrun started this process, possibly as the only one."""
    return {"WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def is_grouped(parallel: str) -> bool:
    """Return True if a run with this setting of `parallel` has a process group."""
    return n_processes() > 1 or (parallel == "fsdp" and is_launched())


def validate_single_process(parallel: str) -> None:
    """Raise ConfigError if this setting requires torchrun, which did not start the process."""
    if parallel != "auto" and not is_launched():
        raise ConfigError(
            f"parallel={parallel!r} requires several processes. Start the run with `torchrun "
            "--nproc-per-node N -m rlhf_lab ...`, or set parallel='auto'."
        )


def process_rank(name: str = "RANK") -> int:
    """Return RANK, or LOCAL_RANK on its machine, of this process; 0 without torchrun."""
    rank = os.environ.get(name, "0")
    return int(rank) if n_processes() > 1 and rank.isdecimal() else 0
