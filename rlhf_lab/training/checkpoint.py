"""Checkpoints: weights and training state as safetensors with a checksum, never pickle."""

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from rlhf_lab.errors import RunError
from rlhf_lab.training.notes import check_notes
from rlhf_lab.training.run_dir import replacing

OPTIMIZER = "optimizer."


def save_checkpoint(path: Path, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
    """Write tensors, and notes as JSON in the file's header, in one step that cannot be half done.

    Raises:
        RunError: the file cannot be written; an earlier one of that name is intact.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    written = json.dumps(notes)
    header = {"notes": written, "crc32": str(checksum(tensors, written))}
    with replacing(path) as partial:
        try:
            save_file(tensors, partial, metadata=header)
        except SafetensorError as error:
            raise OSError(str(error)) from error


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_checkpoint` wrote.

    Raises:
        RunError: there is no such file, or it is not as it was written.
    """
    if not path.is_file():
        found = sorted(p.stem for p in path.parent.glob("*.safetensors"))
        numbers = [str(int(name.split("_")[1])) for name in found if name.startswith("phase_")]
        named = [name for name in found if not name.startswith("phase_")]
        if numbers:
            named.append(f"those after {', '.join(numbers)} phases, by number")
        there = f"there are {', '.join(named)}" if found else "there are none yet"
        raise RunError(f"there is no checkpoint {path}; {there}.")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if int(header["crc32"]) != checksum(tensors, header["notes"]):
            raise ValueError("checksum differs")
        notes = json.loads(header["notes"])
        check_notes(notes)
    except (SafetensorError, OSError, KeyError, ValueError, RecursionError) as error:
        raise RunError(
            f"{path} is corrupt ({error}); use another checkpoint or a backup."
        ) from None
    return tensors, notes


def read_notes(path: Path) -> dict[str, Any]:
    """The notes of a checkpoint, without its tensors.

    Raises:
        RunError: there is no such file, or it is not a checkpoint.
    """
    try:
        with safe_open(path, framework="pt") as file:
            notes = json.loads(file.metadata()["notes"])
        check_notes(notes)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise RunError(f"{path} is no checkpoint ({error}); name another one.") from None
    return notes


def weights(module: nn.Module) -> dict[str, Tensor]:
    """All parameters that can be trained, by name; a frozen one is where it was loaded from."""
    return {name: weight for name, weight in module.named_parameters() if weight.requires_grad}


def load_weights(module: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Copy the checkpoint's weights into a module of the same shape.

    Raises:
        RunError: a parameter is missing, or has another shape or dtype.
    """
    parameters = weights(module)
    for name, parameter in parameters.items():
        if name not in tensors or tensors[name].shape != parameter.shape:
            raise RunError(f"{path} has no fitting {name!r}; it belongs to another model.")
        if tensors[name].dtype != parameter.dtype:
            raise RunError(
                f"{path} holds {name!r} as {tensors[name].dtype}, and the model as "
                f"{parameter.dtype}; restore the file that the run wrote."
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def optimizer_tensors(
    optimizer: Optimizer, put_together: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> dict[str, Tensor]:
    """The optimiser's state as flat tensors of their own: optimizer.INDEX.NAME.

    INDEX counts the parameters of all groups, as `Optimizer.state_dict` does. Whole numbers become
    tensors, and a tensor that several parameters share (a table of 8-bit codes) one for each.

    Args:
        put_together: makes the whole of a tensor of which this process has a part.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = {
        f"{OPTIMIZER}{index}.{name}": put_together(torch.as_tensor(value))
        for index, parameter in enumerate(parameters)
        for name, value in optimizer.state.get(parameter, {}).items()
        if value is not None  # SGD without momentum notes that it has none
    }
    owners = {tensor.data_ptr(): name for name, tensor in tensors.items()}
    return {
        name: tensor if owners[tensor.data_ptr()] == name else tensor.clone()
        for name, tensor in tensors.items()
    }


def load_optimizer(
    optimizer: Optimizer,
    tensors: dict[str, Tensor],
    cut_up: Callable[[Tensor, Tensor], Tensor] = lambda whole, weight: whole,
) -> None:
    """Put back the state that `optimizer_tensors` took; learning rates are left as they are.

    Args:
        cut_up: takes of the moment of a weight the part that this process holds.
    """
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor | int]] = {}
    for name, tensor in tensors.items():
        if name.startswith(OPTIMIZER):
            index, field = name.removeprefix(OPTIMIZER).split(".", 1)
            number = tensor.ndim == 0 and not tensor.is_floating_point()
            value = tensor.item() if number else cut_up(tensor, weights[int(index)])
            state.setdefault(int(index), {})[field] = value
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def checksum(tensors: Mapping[str, Tensor], notes: str = "") -> int:
    """CRC-32 over the notes, then names and bytes, in host memory, in the order of names."""
    crc = zlib.crc32(notes.encode())
    for name in sorted(tensors):
        raw = tensors[name].reshape(-1).view(torch.uint8).numpy()
        crc = zlib.crc32(raw, zlib.crc32(name.encode(), crc))
    return crc
