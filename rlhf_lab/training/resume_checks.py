"""Checks of the checkpoint that a run is to go on from: its own, whole, of the same settings."""

import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from rlhf_lab.config import RLHFArgs
from rlhf_lab.config.args import EARLIER_NAMES
from rlhf_lab.errors import RunError
from rlhf_lab.training import checkpoint
from rlhf_lab.training.checkpoint_writer import wait_for_writers
from rlhf_lab.training.half_weights import state_dtypes
from rlhf_lab.training.notes import NEEDED
from rlhf_lab.training.run_dir import RunDir

CHANGEABLE = ("total_phases", "base_lr", "head_lr", "kl_coef", "save_every", "parallel")
"""The settings that may change when a run goes on."""
MOMENT = re.compile(re.escape(checkpoint.OPTIMIZER) + "([0-9]+)[.]([a-z_0-9]+)")
"""The names under which moments are saved: the parameter's number, and which moment it is."""
PLACES = ("device", "base_model", "reward_model", "prompts", "critic_from", "adapter_from")
"""Settings that say where things are: one that was corrected in run.json is only told."""


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


def refuse_moved_on(run: RunDir, saved: int | None) -> None:
    """Say so if another trainer has saved the run since it was loaded.

    Args:
        saved: the phase of the checkpoint that it was loaded from.

    Raises:
        RunError: it has.
    """
    path = run.checkpoints / "last.safetensors"
    wait_for_writers(run.checkpoints)
    if path.exists() and (found := checkpoint.read_notes(path).get("phase")) != saved:
        raise RunError(
            f"{path} is of phase {found} by now, not of {saved}: another trainer has gone on with "
            f"the run; load it again with `resume {run.path}`."
        )
