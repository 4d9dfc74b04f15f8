"""Environment of torchrun, the launcher: how many processes there are, and which is this."""

import os
from collections.abc import Mapping


def launched(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes torchrun started; 1 without it."""
    return int(environment.get("WORLD_SIZE", "1"))


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun started this process, be it the only one."""
    return "WORLD_SIZE" in environment


def is_grouped(parallel: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process meets others, or is the only one that torchrun started to shard weights.

    Args:
        parallel: the setting `RLHFArgs.parallel`.
    """
    return launched(environment) > 1 or (parallel == "fsdp" and is_launched(environment))


def is_main_process(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this is the process that prints; known before the processes meet."""
    return int(environment.get("RANK", "0")) == 0


def local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """The number of this process on its machine; 0 without torchrun."""
    return int(environment.get("LOCAL_RANK", "0"))


def processes_per_node(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes torchrun started on this machine; all of them where it does not say."""
    return int(environment.get("LOCAL_WORLD_SIZE", launched(environment)))
