"""The policy of a finished, running or broken-off run, without its trainer."""

from pathlib import Path

import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import RunError
from rlhf_lab.models import TransformerWithValueHead, build_policy
from rlhf_lab.rewards import with_critic_from
from rlhf_lab.training.checkpoint import load_checkpoint, load_weights
from rlhf_lab.training.run_dir import RunDir


def load_policy(
    path: str | Path, which: str | int = "last", device: str | torch.device = "cpu"
) -> tuple[TransformerWithValueHead, RLHFArgs]:
    """The policy that a run saved, and the run's arguments.

    Args:
        path: the run's directory.
        which: "last", "best", or the number of learning phases behind the weights (0, 1, 2, 4, 8,
            ...).

    Raises:
        RunError: no run, no such checkpoint, or a corrupt one.
    """
    run = RunDir.open(path)
    info = run.read_info()
    if "policy" in info.get("own_parts", []):
        raise RunError(
            f"{run.path} was trained with its own policy; build that model and use load_weights."
        )
    args = RLHFArgs.from_dict(info["args"])
    file = run.checkpoints / f"{checkpoint_name(which)}.safetensors"
    tensors, _ = load_checkpoint(file)
    policy = build_policy(args, device)
    if args.critic_from is not None:
        policy = with_critic_from(policy, args.critic_from)
    load_weights(policy, tensors, file)
    return policy, args


def checkpoint_name(which: str | int) -> str:
    """The name of a checkpoint's file, given its own name or a number of learning phases."""
    return f"phase_{which:06d}" if isinstance(which, int) else which
