"""Saved runs: the policy of a run, and a trainer that continues from its last checkpoint."""

import dataclasses
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.organism.bundled import BUNDLED
from rlhf_lab.rewards import load_policy_and_critic
from rlhf_lab.training.capture import InterventionFn, Interventions, restore_interventions
from rlhf_lab.training.checkpoint import (
    FROZEN,
    STATEFUL,
    checksum_model,
    load_checkpoint,
    load_weights,
    unflatten_state,
    wait_for_writers,
)
from rlhf_lab.training.kl_control import restore_reference
from rlhf_lab.training.run_dir import RunDir, reading

if TYPE_CHECKING:
    from rlhf_lab.training.trainer import RLHFTrainer

CHANGEABLE = ("total_phases", "base_lr", "head_lr", "kl_coef", "save_every", "parallel")
OF_POLICY = ["base_model", "critic_path", "adapter_path"]
LOCATIONS = ["device", "reference_model", "reward_model", "prompts", *OF_POLICY]
SET_BY = {"kl_coef": "kl_controller", "base_lr": "optimizer", "head_lr": "optimizer"}


def resume_trainer(
    kind: "type[RLHFTrainer]",
    path: str | os.PathLike,
    changes: Mapping[str, Any] | None = None,
    **parts: Any,
) -> "RLHFTrainer":
    """Return a trainer that continues where a run was last saved.

    Args:
        changes: new values of settings, of those in `CHANGEABLE`.
        parts: the run's custom components and `interventions={name: fn}`, which are not stored.

    Raises:
        RunError, ConfigError: If a file is damaged, components differ, or a change is impossible.
    """
    if not isinstance(changes or {}, Mapping):
        raise ConfigError(f"changes={changes!r:.50} is not a dict. Pass {{'total_phases': 25}}.")
    run = RunDir.open(path)
    info = run.read_info()
    interventions = parts.pop("interventions", None)
    validate_components(info.get("custom_components", []), parts, run.path)
    before, n = read_args(info), info.get("last_saved_phase") or 0
    if (total := (changes or {}).get("total_phases")) in range(n):
        raise ConfigError(f"total_phases={total} must be >= {n}, the phases done.")
    trainer = kind(changed_args(before, changes or {}, parts), **parts)
    restore_interventions(trainer.intervene, info, interventions, run.path)
    warn_about_changes(info.get("sources", {}), trainer.sources)
    restore(trainer, run, info)
    phase, args = trainer.phase, trainer.args
    if phase > args.total_phases:
        raise ConfigError(f"total_phases={args.total_phases} must be >= {phase}, the phases done.")
    trainer.recorder.changes = info.get("changes", []) + [
        {"phase": phase, "field": name, "from": getattr(before, name), "to": getattr(args, name)}
        for name in CHANGEABLE
        if getattr(before, name) != getattr(args, name)
    ]
    return trainer


def warn_about_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name, value in now.items():
        if (was := before.get(name, value)) != value:
            warnings.warn(
                f"{name} has changed since the run started, from {was} to {value}. The new "
                "one is used, so results are not comparable. Restore the old one.",
                stacklevel=3,
            )


def read_args(info: Mapping[str, Any], locations: Sequence[str] = LOCATIONS) -> RLHFArgs:
    """Return a run's settings; raise RunError if a location is not here any more."""
    start = info.get("working_directory", "")
    for name in locations:
        path = info["args"].get(name) or "."
        is_path = path not in (*BUNDLED, "sums", info["args"]["device"])
        was_here = os.path.isabs(path) or os.path.exists(os.path.join(start, path))
        if is_path and was_here and not os.path.exists(path):
            remedy = f"Use the run from there, or correct {name} in run.json"
            raise RunError(f"The run of {start} has {name}={path!r}, which is not here. {remedy}.")
    try:
        return RLHFArgs(**info["args"])
    except ConfigError as error:
        version = info.get("versions", {}).get("rlhf_lab", "unknown")
        raise RunError(f"run.json, written by rlhf_lab {version}: {error}") from error


def validate_components(custom: list[str], parts: Mapping[str, Any], path: Path) -> None:
    """Raise RunError unless the custom components of the run, and no others, are passed."""
    passed = {name for name, part in parts.items() if part is not None}
    if missing := sorted(set(custom) - {"interventions"} - passed):
        raise RunError(
            f"{path} was trained with custom components: {', '.join(missing)}. Resume it from "
            f"Python with RLHFTrainer.resume({str(path)!r}, {missing[0]}=...)."
        )
    for name in sorted(passed - set(custom)):
        remedy = f"Pass {{{name!r}: ...}} as changes" if name in CHANGEABLE else f"Leave {name} out"
        raise RunError(f"{path} was trained without a custom {name}. {remedy}.")


def changed_args(args: RLHFArgs, changes: Mapping[str, Any], parts: Mapping[str, Any]) -> RLHFArgs:
    """Return a run's settings with these changes; raise ConfigError for one that cannot change."""
    for name, value in changes.items():
        if name not in CHANGEABLE:
            raise ConfigError(
                f"{name}={value!r} cannot change when a run is resumed, only "
                f"{', '.join(CHANGEABLE)} can. Start a new run."
            )
        if SET_BY.get(name) in parts and value != getattr(args, name):
            raise ConfigError(f"{name} cannot change with a custom {SET_BY[name]}. Change that.")
    return dataclasses.replace(args, **changes)


def restore(trainer: "RLHFTrainer", run: RunDir, info: Mapping[str, Any]) -> None:
    """Load `last` into a new trainer; a run without one starts at phase 0."""
    recorder, path = trainer.recorder, run.checkpoints / "last.safetensors"
    recorder.run, recorder.run_id = run, info["id"]
    wait_for_writers(run.checkpoints)
    if not path.exists() and info.get("last_saved_phase") is None:
        return
    tensors, metadata = load_checkpoint(path, run=info["id"], name="last")
    with reading(path):
        validate_settings(metadata["args"], info, path)
        load_weights(trainer.policy, tensors, path)
        load_training_state(trainer, tensors, metadata)
        restore_reference(trainer, tensors, metadata, path)
        trainer.phase = recorder.last_saved_phase = metadata["phase"]
        recorder.best = metadata["best"]
        trainer.rewards.moments = F.RunningMoments(**metadata["reward_moments"])


def load_training_state(
    trainer: "RLHFTrainer", tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]
) -> None:
    """Restore optimizer, scheduler and KL controller; changed settings replace saved values."""
    rates = getattr(trainer.scheduler, "base_lrs", None)
    is_custom = "kl_controller" in trainer.custom_components
    keeps_coef = is_custom or metadata["args"]["kl_coef"] == trainer.args.kl_coef
    for name in STATEFUL:
        component, saved = getattr(trainer, name), metadata[name]["class"]
        if saved != type(component).__qualname__:
            raise RunError(
                f"The run was trained with {name}={saved}, and this trainer has "
                f"{type(component).__qualname__}. Pass the {name} of the run."
            )
        state = unflatten_state(metadata[name]["state"], tensors)
        if name == "optimizer" and trainer.world is not None:
            state = trainer.world.shard_state(state, component)
        if hasattr(component, "load_state_dict"):
            component.load_state_dict(state)
        elif keeps_coef:
            vars(component).update(state)
    if "optimizer" not in trainer.custom_components:
        set_rates(trainer, rates)


def set_rates(trainer: "RLHFTrainer", peaks: list[float]) -> None:
    """Set the learning rates of this phase by the settings, which may have changed."""
    scheduler, groups = trainer.scheduler, trainer.optimizer.param_groups
    scheduler.base_lrs, scheduler._last_lr = peaks, []
    for group, peak, scale in zip(groups, peaks, scheduler.lr_lambdas, strict=True):
        group["initial_lr"], group["lr"] = peak, peak * scale(scheduler.last_epoch)
        scheduler._last_lr.append(group["lr"])


def validate_settings(saved: Mapping[str, Any], info: Mapping[str, Any], path: Path) -> None:
    """Raise RunError if run.json was edited since the checkpoint, except for locations."""
    changed = {change["field"] for change in info.get("changes", [])}
    for name, value in info["args"].items():
        if value != saved.get(name) and name not in changed and name not in LOCATIONS:
            raise RunError(
                f"run.json has {name}={value!r}, but {path} was saved with {saved.get(name)!r}. "
                f"Restore the value, and change it in a new run (or with `resume`)."
            )


def load_policy(
    path: str | os.PathLike,
    which: str | SupportsIndex = "last",
    device: str | torch.device = "cpu",
    interventions: Mapping[str, InterventionFn] | None = None,
) -> tuple[TransformerWithValueHead, RLHFArgs]:
    """Load the policy that a run saved, and the run's arguments.

    Args:
        which: "last", "best", or the number of learning phases before the checkpoint (0, 1, 2, 3,
            5, 8, ..., as far as `keep_checkpoints` keeps them).

    Raises:
        RunError: If there is no run or no such checkpoint, or the file is corrupt.
        ConfigError: If a function is missing, or the run has no intervention of that name.
    """
    run = RunDir.open(path)
    info = run.read_info()
    if "policy" in info.get("custom_components", []):
        raise RunError(f"{run.path} has a custom policy. Build that model and call load_weights.")
    args = read_args(info, OF_POLICY)
    file = run.checkpoints / f"{checkpoint_name(which)}.safetensors"
    tensors, metadata = load_checkpoint(file, run=info["id"], name=file.stem)
    policy = load_policy_and_critic(args, device)
    warn_about_changes(info.get("sources", {}), {FROZEN: checksum_model(policy)})
    load_weights(policy, tensors, file)
    of_run = Interventions(policy, lambda: metadata["phase"])
    restore_interventions(of_run.add, info, interventions, run.path)
    return policy, args


def checkpoint_name(which: str | SupportsIndex) -> str:
    """Return the name of a checkpoint's file, from its own name or a number of learning phases."""
    if isinstance(which, str) and re.fullmatch(r"[A-Za-z]\w{0,63}", which, re.ASCII):
        return which
    if isinstance(which, SupportsIndex) and 0 <= which < 10**18:
        return f"phase_{int(which):06d}"
    raise RunError(f"checkpoint={which!r:.40} is not a checkpoint. Choose last, best or a number.")
