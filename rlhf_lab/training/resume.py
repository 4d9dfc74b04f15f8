"""Resume: a trainer that goes on where a run was last saved, with settings that may change."""

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_lab import functional as F
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.training import checkpoint
from rlhf_lab.training.checkpoint_writer import wait_for_writers
from rlhf_lab.training.reference_reset import restore_reference
from rlhf_lab.training.resume_checks import (
    CHANGEABLE,
    refuse_edited,
    refuse_incomplete,
    refuse_lost,
    refuse_other_file,
    refuse_other_moments,
)
from rlhf_lab.training.run_dir import RunDir
from rlhf_lab.training.run_lock import refuse_locked

if TYPE_CHECKING:
    from rlhf_lab.training.trainer import RLHFTrainer


def resume_trainer(
    kind: "type[RLHFTrainer]", run: RunDir, changes: Mapping[str, Any] | None, parts: dict[str, Any]
) -> "RLHFTrainer":
    """A trainer that goes on where a run was last saved; see `RLHFTrainer.resume`.

    Raises:
        RunError: another trainer has the run, an own part is missing, or see `restore`.
        ConfigError: a change that cannot be, an intervention that is missing, or one that the run
            does not have.
    """
    info = run.read_info()
    refuse_locked(run.path)
    interventions = parts.pop("interventions", None)
    missing = sorted(set(info.get("own_parts", [])) - {"interventions"} - parts.keys())
    if missing:
        raise RunError(
            f"{run.path} was trained with its own {', '.join(missing)}; resume it from Python with "
            f"RLHFTrainer.resume({str(run.path)!r}, {missing[0]}=...)."
        )
    for name in sorted(name for name, part in parts.items() if part is not None):
        if name not in info.get("own_parts", [name]):
            raise RunError(
                f"{run.path} was trained without a {name} of its own; leave {name} out, or start a "
                "new run with it."
            )
    before = RLHFArgs.from_dict(info["args"])
    args = changed_args(before, changes or {})
    for name, part in {
        "kl_coef": "kl_controller",
        "base_lr": "optimizer",
        "head_lr": "optimizer",
    }.items():
        if getattr(args, name) != getattr(before, name) and part in parts:
            raise ConfigError(f"{name} cannot change under your own {part}; change it there.")
    trainer = kind(args, **parts)
    warn_of_another_class(trainer, info)
    records = info.get("interventions", [])
    trainer.interventions.put_back(records, interventions, run.path)
    trainer.own_parts += ["interventions"] * bool(records)
    restore(trainer, run, info)
    if trainer.phase > args.total_phases:
        raise ConfigError(
            f"total_phases={args.total_phases} is below the {trainer.phase} phases that the run "
            "has done; choose at least that many."
        )
    note_changes(trainer, before, info.get("changes", []))
    return trainer


def warn_of_another_class(trainer: "RLHFTrainer", info: Mapping[str, Any]) -> None:
    """Say so if the run's classifier now has another class in the place of the rewarded one."""
    before, now = info.get("rewarded_class"), trainer.rewarded_class
    if before and now and before != now:
        warnings.warn(
            f"the run rewarded class {before['index']}, {before['label']!r}; from here on it "
            f"rewards class {now['index']}, {now['label']!r}, as reward_model names them now.",
            stacklevel=2,
        )


def changed_args(args: RLHFArgs, changes: Mapping[str, Any]) -> RLHFArgs:
    """The settings of a run that goes on with these changes.

    Raises:
        ConfigError: a setting that may not change, or values that do not go together.
    """
    if not isinstance(changes, Mapping):
        raise ConfigError(
            f"changes={changes!r} must name settings with their new values, as in "
            "{'total_phases': 30}."
        )
    for name in changes:
        if name not in CHANGEABLE:
            raise ConfigError(
                f"{name}={changes[name]!r} cannot change when a run goes on, only "
                f"{', '.join(CHANGEABLE)} can; start a new run for it."
            )
    return dataclasses.replace(args, **changes)


def note_changes(trainer: "RLHFTrainer", before: RLHFArgs, noted: list[dict[str, Any]]) -> None:
    """Let the recorder write what is changed from this phase on, besides what was noted before.

    What was noted for later phases, which are done again, holds from this one.
    """
    phase, recorder = trainer.phase, trainer.recorder
    recorder.changes = [change | {"phase": min(change["phase"], phase)} for change in noted]
    for name in CHANGEABLE:
        old, new = getattr(before, name), getattr(trainer.args, name)
        if old != new:
            recorder.changes.append({"phase": phase, "field": name, "from": old, "to": new})


def restore(trainer: "RLHFTrainer", run: RunDir, info: Mapping[str, Any]) -> None:
    """Put a new trainer where the run in this directory was last saved.

    1. Find `last`; a run that has none yet begins at phase 0.
    2. Refuse one that is not this run's own `last`, whole.
    3. Load weights, moments, best, reward moments, the coefficient of the KL penalty, and the
       reference where it was reset.
    4. Set the schedule to this phase, by the settings as they are now.

    Raises:
        RunError: the checkpoint is missing, corrupt, foreign, or of other settings or parts.
    """
    recorder, path = trainer.recorder, run.checkpoints / "last.safetensors"
    recorder.run, recorder.run_id = run, info.get("id", recorder.run_id)
    wait_for_writers(run.checkpoints)
    if not path.exists():
        refuse_lost(run, info, trainer.args)
        return
    tensors, notes = checkpoint.load_checkpoint(path)
    refuse_other_file(notes, info, path)
    refuse_incomplete(tensors, notes, path)
    if "optimizer" not in trainer.own_parts:
        refuse_other_moments(trainer.optimizer, tensors, notes["phase"], path)
    refuse_edited(notes, info, path)
    checkpoint.load_weights(trainer.policy, tensors, path)
    trainer.weights.load_moments(trainer.optimizer, tensors)
    restore_reference(trainer, tensors, notes, path)
    trainer.phase, recorder.best = notes["phase"], notes["best"]
    recorder.saved = notes["phase"]
    trainer.rewards.moments = F.RunningMoments(**notes.get("reward_moments", {}))
    if _kl_coef_asked(notes, info) in (None, trainer.args.kl_coef):
        trainer.kl_controller.kl_coef = notes["kl_coef"]  # which an adaptive one has moved
    restore_schedule(trainer, notes["scheduler"], path)


def restore_schedule(trainer: "RLHFTrainer", state: Mapping[str, Any], path: Path) -> None:
    """Set the schedule to the phase it was saved in; the rates are those of the settings now.

    A schedule of the caller's own goes on from the rates that were saved.

    Raises:
        RunError: it was saved for another number of parameter groups.
    """
    scheduler, groups = trainer.scheduler, trainer.optimizer.param_groups
    if len(state["_last_lr"]) != len(groups):
        raise RunError(
            f"{path} was saved by an optimizer with {len(state['_last_lr'])} parameter groups, and "
            f"this one has {len(groups)}; hand in the one that the run had."
        )
    scheduler.load_state_dict(scheduler.state_dict() | state)
    if "scheduler" not in trainer.own_parts:
        scales = [scale(scheduler.last_epoch) for scale in scheduler.lr_lambdas]
        rates = zip(scheduler.base_lrs, scales, strict=True)
        scheduler._last_lr = [rate * scale for rate, scale in rates]
    for group, rate in zip(groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = rate


def _kl_coef_asked(notes: Mapping[str, Any], info: Mapping[str, Any]) -> float | None:
    """The `kl_coef` of the settings that a checkpoint was saved under, where they are known."""
    changes = (c for c in info.get("changes", []) if c["phase"] >= notes["phase"])
    before = [change["from"] for change in changes if change["field"] == "kl_coef"]
    if "args" in notes:
        return notes["args"]["kl_coef"]
    return before[0] if before else info["args"].get("kl_coef")
