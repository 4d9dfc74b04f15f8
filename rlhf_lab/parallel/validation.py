"""Validation of settings and components for several processes."""

import json
import platform
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from rlhf_lab import __version__
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, RankError
from rlhf_lab.models.value_head import has_standard_forward
from rlhf_lab.parallel.launcher import is_launched, n_processes, process_rank
from rlhf_lab.training.checkpoint import checksum

if TYPE_CHECKING:
    from rlhf_lab.parallel.world import World
    from rlhf_lab.training.trainer import RLHFTrainer


def device_of_rank(device: torch.device, setting: str) -> torch.device:
    """Return the device of this process: each has its own GPU."""
    if (rank := process_rank()) >= (n := n_processes()):
        raise RankError(f"RANK={rank} must be below WORLD_SIZE={n}. Start with torchrun.")
    if not is_launched():
        raise ConfigError(
            f"WORLD_SIZE={n} is set, and RANK, MASTER_ADDR or MASTER_PORT is not. Start the run "
            "with torchrun, or unset WORLD_SIZE."
        )
    if device.type == "mps" or not dist.is_available():
        raise ConfigError(
            f"device={setting!r} works in one process only. Set device='cpu', or start the run "
            "without torchrun."
        )
    if device.type != "cuda" or n == 1:
        return device
    if torch.device(setting if setting != "auto" else "cuda").index is not None:
        raise ConfigError(
            f"device={setting!r} names one device for {n} processes. Set device='auto'."
        )
    return torch.device("cuda", process_rank("LOCAL_RANK"))


def validate_process_settings(args: RLHFArgs, size: int) -> None:
    minibatch = args.batch_size // args.num_minibatches
    if args.batch_size % size or minibatch % size:
        raise ConfigError(
            f"batch_size={args.batch_size} and its minibatches of {minibatch} sequences must be "
            f"divisible by {size} processes. Change batch_size or num_minibatches, or start "
            "another number of processes."
        )
    required = {"optimizer_in_backward": False}  # it steps before the gradients are summed
    if args.parallel == "fsdp":  # no process has whole weights during a step
        required |= {"optimizer": "adamw", "weight_precision": "fp32", "reference_device": None}
        if args.precision == "bf16":  # a whole copy would be kept until the backward pass
            required["activation_checkpointing"] = True
    for name, value in required.items():
        if (setting := getattr(args, name)) != value:
            raise ConfigError(
                f"{name}={setting!r} cannot be combined with several processes, parallel="
                f"{args.parallel!r} and precision={args.precision!r}. Set {name}={value!r}."
            )


def validate_shardable(policy: nn.Module, reference: nn.Module, optimizer: Any) -> None:
    """Raise ConfigError for custom components that FSDP2 cannot shard."""
    trained = {id(p) for p in policy.parameters() if p.requires_grad}
    conflicts = {
        f"the custom forward of {type(policy).__name__}": not has_standard_forward(policy),
        "a custom optimizer": optimizer is not None,
        "trained weights of the reference": trained & set(map(id, reference.parameters())),
    }
    for component, is_set in conflicts.items():
        if is_set:
            raise ConfigError(f"parallel='fsdp' does not shard {component}. Set parallel='ddp'.")


def validate_equal(world: "World", trainer: "RLHFTrainer") -> None:
    """Raise ConfigError, on every rank, if ranks differ in versions, settings or weights."""
    local = {
        "rlhf_lab": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "settings": json.dumps(trainer.args.to_dict()),
    }
    for name in ("policy", "reference"):
        named = getattr(trainer, name).named_parameters()
        copies = {name: weight.detach().cpu() for name, weight in named}
        local[f"weights of the {name}"] = checksum(copies)
    main = world.broadcast(local)
    different = [name for name in local if local[name] != main[name]]
    with world.barrier("comparing itself with process 0"):
        if different:
            raise ConfigError(
                f"Process {world.rank} and process 0 differ in: {', '.join(different)}. Start them "
                "with the same packages and files."
            )
