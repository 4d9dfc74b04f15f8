"""The policy of a finished, running or interrupted run, without its trainer."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import RunError
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.rewards import load_policy_and_critic
from rlhf_lab.training.checkpoint import load_checkpoint, load_weights, wait_for_writers
from rlhf_lab.training.interventions import InterventionFn, Interventions
from rlhf_lab.training.resume import validate_checkpoint_run
from rlhf_lab.training.run_dir import RunDir


def load_policy(
    path: str | Path,
    which: str | int = "last",
    device: str | torch.device = "cpu",
    interventions: Mapping[str, InterventionFn] | None = None,
) -> tuple[TransformerWithValueHead, RLHFArgs]:
    """Load the policy that a run saved, and the run's arguments.

    Args:
        path: The run's directory.
        which: "last", "best", or the number of learning phases before the checkpoint (0, 1, 2, 3,
            5, 8, ..., as far as `keep_checkpoints` keeps them).
        interventions: The functions of the run's interventions by name, if it had any.

    Raises:
        RunError: If there is no run or no such checkpoint, or the file is corrupt.
        ConfigError: If a function is missing, or the run has no intervention of that name.
    """
    run = RunDir.open(path)
    info = run.read_info()
    if "policy" in info.get("custom_components", []):
        raise RunError(
            f"{run.path} was trained with a custom policy. Build that model and call load_weights."
        )
    args = RLHFArgs.from_dict(info["args"])
    file = run.checkpoints / f"{checkpoint_name(which)}.safetensors"
    wait_for_writers(run.checkpoints)
    tensors, metadata = load_checkpoint(file)
    validate_checkpoint_run(metadata, info, file)
    policy = load_policy_and_critic(args, device)
    load_weights(policy, tensors, file)
    interventions_of_run = Interventions(policy, lambda: (metadata["phase"], "rollout"))
    interventions_of_run.restore(info.get("interventions", []), interventions, run.path)
    return policy, args


def checkpoint_name(which: str | int) -> str:
    """Return the name of a checkpoint's file, from its own name or a number of learning phases."""
    if isinstance(which, str) and re.fullmatch(r"[A-Za-z]\w{0,63}", which, re.ASCII):
        return which
    if isinstance(which, int) and 0 <= which < 10**18:
        return f"phase_{which:06d}"
    raise RunError(
        f"checkpoint={which!r:.40} is not a checkpoint. Choose last, best or a number of phases."
    )
