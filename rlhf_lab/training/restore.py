"""The policy of a finished, running or broken-off run, without its trainer."""

from collections.abc import Mapping
from pathlib import Path
from re import ASCII, fullmatch

import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import RunError
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.rewards import load_policy_and_critic
from rlhf_lab.training.checkpoint import load_checkpoint, load_weights
from rlhf_lab.training.checkpoint_space import refuse_removed, with_loaded
from rlhf_lab.training.checkpoint_writer import wait_for_writers
from rlhf_lab.training.interventions import InterventionFn, Interventions
from rlhf_lab.training.resume_checks import refuse_other_file
from rlhf_lab.training.run_dir import RunDir


def load_policy(
    path: str | Path,
    which: str | int = "last",
    device: str | torch.device = "cpu",
    interventions: Mapping[str, InterventionFn] | None = None,
) -> tuple[TransformerWithValueHead, RLHFArgs]:
    """The policy that a run saved, and the run's arguments.

    Args:
        path: the run's directory.
        which: "last", "best", or the number of learning phases behind the weights (0, 1, 2, 4, 8,
            ..., those that `keep_checkpoints` keeps).
        interventions: the functions of the run's interventions by name, if it had any; they act
            as they did while the policy wrote.

    Raises:
        RunError: no run, no such checkpoint, or a corrupt one.
        ConfigError: an intervention that is missing, or one that the run does not have.
    """
    run = RunDir.open(path)
    info = run.read_info()
    if "policy" in info.get("own_parts", []):
        raise RunError(
            f"{run.path} was trained with its own policy; build that model and use load_weights."
        )
    args = RLHFArgs.from_dict(info["args"])
    file = run.checkpoints / f"{checkpoint_name(which)}.safetensors"
    wait_for_writers(run.checkpoints)
    refuse_removed(which, args, file)
    tensors, notes = load_checkpoint(file)
    refuse_other_file(notes, info, file)
    policy = load_policy_and_critic(args, device)
    load_weights(policy, with_loaded(policy, tensors, notes, file), file)
    acting = Interventions(policy, lambda: notes["phase"])
    acting.put_back(info.get("interventions", []), interventions, run.path)
    return policy, args


def checkpoint_name(which: str | int) -> str:
    """The name of a checkpoint's file, given its own name or a number of learning phases.

    Raises:
        RunError: no checkpoint can have that name.
    """
    if isinstance(which, str) and fullmatch(r"[A-Za-z]\w{0,63}", which, ASCII):
        return which
    if isinstance(which, int) and 0 <= which < 10**18:
        return f"phase_{which:06d}"
    shown = f"{which!r:.40}" if isinstance(which, str) else "a number out of range"
    raise RunError(
        f"checkpoint={shown} names no checkpoint; give last, best or a number of learning phases."
    )
