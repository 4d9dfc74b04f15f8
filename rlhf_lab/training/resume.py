"""Resume: a trainer that goes on where a run was last saved, with settings that may change."""

import dataclasses
import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from rlhf_lab import functional as F
from rlhf_lab.config import RLHFArgs
from rlhf_lab.config.args import EARLIER_NAMES
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.training import checkpoint
from rlhf_lab.training.checkpoint_writer import wait_for_writers
from rlhf_lab.training.half_weights import state_dtypes
from rlhf_lab.training.notes import NEEDED
from rlhf_lab.training.reference_reset import restore_reference
from rlhf_lab.training.run_dir import RunDir
from rlhf_lab.training.run_lock import refuse_locked

if TYPE_CHECKING:
    from rlhf_lab.training.trainer import RLHFTrainer

CHANGEABLE = ("total_phases", "base_lr", "head_lr", "kl_coef", "save_every", "parallel")
"""The settings that may change when a run goes on."""
MOMENT = re.compile(re.escape(checkpoint.OPTIMIZER) + "([0-9]+)[.]([a-z_0-9]+)")
"""The names under which moments are saved: the parameter's number, and which moment it is."""
PLACES = ("device", "base_model", "reward_model", "prompts", "critic_from", "adapter_from")
"""Settings that say where things are: one that was corrected in run.json is only told."""


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


def refuse_lost(run: RunDir, info: Mapping[str, Any], args: RLHFArgs) -> None:
    """Say so if `last` is missing though the run was saved; else it was killed before.

    Raises:
        RunError: it was saved.
    """
    numbers = [path.stem.removeprefix("phase_") for path in run.checkpoints.glob("phase_*")]
    most = max((int(number) for number in numbers if number.isdecimal()), default=0)
    before = info.get("phases_done") if "saved" not in info else info["saved"] is not None
    if not before and most <= args.save_every:
        return
    there = sorted(path.stem for path in run.checkpoints.glob("*.safetensors") if path.exists())
    path = run.checkpoints / "last.safetensors"
    raise RunError(
        f"{path} {'links to nothing' if path.is_symlink() else 'is missing'}, though the run was "
        f"saved (there are {', '.join(there) or 'no other checkpoints'}, which hold no training "
        "state); restore it from a backup, or start anew with another --out."
    )


def refuse_other_file(notes: Mapping[str, Any], info: Mapping[str, Any], path: Path) -> None:
    """Say so if a checkpoint is another run's, or another one of this run under a new name.

    Checkpoints and runs of earlier versions have no such notes.

    Raises:
        RunError: it is.
    """
    if "run" in notes and notes["run"] != info.get("id"):
        raise RunError(f"{path} is a checkpoint of another run; restore this run's own.")
    if notes.get("name", path.stem) != path.stem:
        raise RunError(f"{path} is a copy of this run's {notes['name']}; restore the file itself.")


def refuse_incomplete(tensors: Mapping[str, Tensor], notes: Mapping[str, Any], path: Path) -> None:
    """Say so if a checkpoint does not hold all notes and tensors that it was written with.

    Raises:
        RunError: it does not.
    """
    for name in NEEDED:
        if name not in notes:
            raise RunError(f"{path} has no {name!r} in its notes; use a backup.")
    if notes.get("tensors", len(tensors)) != len(tensors):
        raise RunError(
            f"{path} holds {len(tensors)} tensors of {notes['tensors']}; restore the file that the "
            "run wrote."
        )


def refuse_other_moments(
    optimizer: Optimizer, tensors: Mapping[str, Tensor], phase: int, path: Path
) -> None:
    """Say so if the moments of a run's own AdamW are missing, halved, or of another model.

    Raises:
        RunError: they are.
    """
    moments = {k: v for k, v in tensors.items() if k.startswith(checkpoint.OPTIMIZER)}
    if phase > 0 and not moments:
        raise RunError(
            f"{path} holds no optimizer state, as a numbered checkpoint does not; restore the "
            "file that the run wrote."
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    fields: dict[int, set[str]] = {}
    for name, tensor in moments.items():
        parts = MOMENT.fullmatch(name)
        fits = parts is not None and int(parts[1]) < len(parameters)
        if fits:
            parameter = parameters[int(parts[1])]
            dtype = state_dtypes(optimizer, parameter).get(parts[2])
            fits = dtype is None or (tensor.shape, tensor.dtype) == (parameter.shape, dtype)
        if not fits:
            raise RunError(f"{path} has no fitting {name!r}; it belongs to another model.")
        fields.setdefault(int(parts[1]), set()).add(parts[2])
    for number, found in fields.items():
        wanted = {"step", *state_dtypes(optimizer, parameters[number])}
        is_adam = bool((wanted - {"step"}) & found)
        if (is_adam and found != wanted) or found == {"step"}:
            raise RunError(
                f"{path} holds {', '.join(sorted(found))} of parameter {number}'s moments, and not "
                f"{', '.join(sorted(wanted))}; restore the file that the run wrote."
            )


def refuse_edited(notes: Mapping[str, Any], info: Mapping[str, Any], path: Path) -> None:
    """Say so if run.json has other settings than the checkpoint, and no `resume` changed them.

    A change that was noted in the checkpoint's phase or later may stand on either side of it. Other
    places are only told.

    Raises:
        RunError: a setting was changed by hand.
    """
    now = json.loads(json.dumps(RLHFArgs.from_dict(info["args"]).to_dict()))
    for name, then in notes.get("args", {}).items():
        name = EARLIER_NAMES.get(name, name)
        changes = [c for c in info.get("changes", []) if c["field"] == name]
        known = [c["from"] for c in changes if c["phase"] >= notes["phase"]]
        if name not in now or then in (now[name], *known):
            continue
        if name in PLACES:
            warnings.warn(
                f"run.json has {name}={now[name]!r}, and {path} was saved with {then!r}; the run "
                "goes on with the former.",
                stacklevel=2,
            )
            continue
        how = f"`resume --{name.replace('_', '-')}`" if name in CHANGEABLE else "a new run"
        raise RunError(
            f"run.json has {name}={now[name]!r}, and {path} was saved with {then!r}; put it back, "
            f"and change it with {how}."
        )
