"""Retention of checkpoints: which ones stay on the disk, and how much of it they take at most."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import RunError
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.training.checkpoint import OPTIMIZER, checksum, weights
from rlhf_lab.training.run_dir import RunDir

LOADED = ("base_model.", "critic.")
"""The weights that a run begins with as they were loaded."""
IDLE = "critic.unembed."
"""Weights that never have a gradient, and so no moments: a critic reads no next token out."""
HEADER = 90
"""Bytes of a tensor's entry in the header of its file, besides its name, rounded up."""
REST_OF_NOTES = 400
"""Bytes of a file's notes besides the settings, rounded up."""


def is_numbered(phase: int, keep: int | None) -> bool:
    """Whether the weights after so many learning phases are saved under their number.

    They are after 0, 1, 2, 4, 8, ...; after 0 alone where no other would stay.
    """
    return phase & (phase - 1) == 0 and (phase == 0 or keep != 0)


def remove_outdated(directory: Path, keep: int | None, phase: int) -> None:
    """Remove the older numbered checkpoints of a run whose `last` is of this phase.

    Those of phase 0 and the `keep` newest stay; all do when None.
    """
    if keep is None:
        return
    numbers = {_number(path): path for path in directory.glob("phase_*.safetensors")}
    older = sorted(number for number in numbers if 0 < number <= phase)
    for number in older[: max(0, len(older) - keep)]:
        numbers[number].unlink(missing_ok=True)


def _number(path: Path) -> int:
    """The number of a numbered checkpoint; 0 for a file that is none, which is left alone."""
    digits = path.stem.removeprefix("phase_")
    return int(digits) if digits.isdecimal() else 0


def refuse_removed(which: str | int, args: RLHFArgs, path: Path) -> None:
    """Say so if a numbered checkpoint is missing because the run keeps few of them.

    Raises:
        RunError: it is.
    """
    keep = args.keep_checkpoints
    if keep is None or path.exists() or not isinstance(which, int) or which & (which - 1):
        return
    there = ", ".join(sorted(found.stem for found in path.parent.glob("*.safetensors")))
    raise RunError(
        f"the checkpoint of phase {which} was not kept, since the run has keep_checkpoints={keep}; "
        f"there are {there or 'none yet'}."
    )


def loaded_weights(
    args: RLHFArgs, own_policy: bool, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The weights that the checkpoint of phase 0 leaves where they were loaded from.

    None, unless the run has a bound on its checkpoints, trains all weights, and loaded them.
    """
    if own_policy or args.keep_checkpoints is None or args.lora_rank or args.adapter_from:
        return {}
    return {name: tensor for name, tensor in tensors.items() if name.startswith(LOADED)}


def with_loaded(
    policy: TransformerWithValueHead,
    tensors: Mapping[str, Tensor],
    notes: Mapping[str, Any],
    path: Path,
) -> dict[str, Tensor]:
    """A checkpoint's tensors, with the weights that it left where they were loaded from.

    Args:
        policy: as it was loaded.

    Raises:
        RunError: other weights are loaded now than when the run began.
    """
    if "as_loaded" not in notes:
        return dict(tensors)
    left = {name: tensor for name, tensor in weights(policy).items() if name not in tensors}
    left = {name: tensor.detach().cpu().contiguous() for name, tensor in left.items()}
    if checksum(left) != notes["as_loaded"]:
        raise RunError(
            f"{path} leaves the weights of the base model where they were loaded from, and they "
            "have changed; restore that model, or use another checkpoint."
        )
    return left | dict(tensors)


def file_bytes(tensors: Mapping[str, Tensor]) -> int:
    """The size of the file that tensors, which may be on the meta device, would fill."""
    data = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return data + sum(len(name) + HEADER for name in tensors)


def notes_bytes(args: RLHFArgs) -> int:
    """The size of a file's notes: the settings, quoted as a string in the header, and the rest."""
    return len(json.dumps(json.dumps(args.to_dict()))) + REST_OF_NOTES


def state_bytes(args: RLHFArgs, policy: TransformerWithValueHead) -> int:
    """The size of the full training state: weights, AdamW's two moments, a reset reference.

    Moments take 8 bytes per weight, or 2 with the scales and tables of 8-bit blocks.
    """
    saved = weights(policy)
    learned = (tensor for name, tensor in saved.items() if not name.startswith(IDLE))
    size = file_bytes(saved) + sum(_moments(args, tensor) + len(OPTIMIZER) for tensor in learned)
    if args.reset_reference_every is not None:
        size += file_bytes({k: v for k, v in saved.items() if k.startswith("base_model.")})
    return size


def _moments(args: RLHFArgs, weight: Tensor) -> int:
    """Bytes of one parameter's optimizer state, its step and entries in the header included."""
    n = weight.numel()
    if args.optimizer == "adamw_8bit" and n >= 4096:
        blocks = -(-n // 256)
        return 2 * (n + 4 * blocks + 4 * 256) + 8 + 7 * HEADER
    if weight.dtype == torch.bfloat16:
        each, entries = (12, 4) if args.weight_precision == "bf16" else (4, 3)
        return each * n + 4 + entries * HEADER
    return 8 * n + 4 + 3 * HEADER


def most_numbered(args: RLHFArgs) -> int:
    """How many numbered checkpoints there are at most at a time, besides that of phase 0."""
    return max(_numbered(args), default=0)


def _numbered(args: RLHFArgs) -> Iterator[int]:
    """How many there are when each is whole; older ones go when `last` is saved after it."""
    keep, phase, there = args.keep_checkpoints, 1, 0
    while phase <= args.total_phases and keep != 0:
        before = (phase - 1) // args.save_every * args.save_every
        if keep is not None and phase // 2 <= before:
            there = min(there, keep)
        there += 1
        yield there
        phase *= 2


def most_bytes(args: RLHFArgs, policy: TransformerWithValueHead, own_policy: bool = False) -> int:
    """The most that a run's checkpoints take on the disk, the one being written included.

    1. Phase 0, the numbered ones, the best and the last.
    2. The last once more: the new one is written beside the old one, then takes its place.
    """
    saved = weights(policy)
    as_loaded = loaded_weights(args, own_policy, saved)
    first = file_bytes({name: saved[name] for name in saved.keys() - as_loaded.keys()})
    with_best = most_numbered(args) + 1
    tensors = first + with_best * file_bytes(saved) + 2 * state_bytes(args, policy)
    return tensors + (1 + with_best + 2) * notes_bytes(args)


def shortage(run: RunDir, most: int) -> str | None:
    """A sentence if the disk has less room than checkpoints may take; those there count."""
    there = sum(path.stat().st_size for path in run.checkpoints.glob("*.safetensors"))
    free = shutil.disk_usage(run.path).free
    if there + free >= most:
        return None
    return (
        f"the checkpoints of this run take up to {in_words(most)} on the disk, and {run.path} has "
        f"room for {in_words(there + free)}; make room, choose another --out, or lower "
        "keep_checkpoints."
    )


def in_words(size: int) -> str:
    """A size in decimal units, as disks are sold."""
    for unit, name in ((10**9, "GB"), (10**6, "MB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size / 1000:.1f} kB"
