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
from rlhf_lab.training.checkpoint_metadata import flatten_state, unflatten_state
from rlhf_lab.training.run_dir import replacing

UNREADABLE = (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError)


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, Any]) -> None:
    """Write tensors, and metadata as JSON in the header, to a draft that replaces the file.

    Raises:
        RunError: If the file cannot be written; an earlier file of that name is intact.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(metadata)
    header = {"metadata": text, "crc32": str(checksum(tensors, text))}
    with replacing(path) as partial:
        try:
            save_file(tensors, partial, metadata=header)
        except SafetensorError as error:
            raise OSError(str(error)) from error


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors and the metadata that `save_checkpoint` wrote.

    Raises:
        RunError: If the file does not exist, or is not as it was written.
    """
    if not path.is_file():
        names = sorted(file.stem for file in path.parent.glob("*.safetensors"))
        available = f"Available: {', '.join(names)}." if names else "None has been saved yet."
        raise RunError(f"No checkpoint {path}. {available}")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if int(header["crc32"]) != checksum(tensors, header["metadata"]):
            raise ValueError("checksum differs")
        return tensors, json.loads(header["metadata"])
    except UNREADABLE as error:
        raise RunError(
            f"{path} is corrupt ({error}). Use another checkpoint or a backup."
        ) from None


def read_metadata(path: Path) -> dict[str, Any]:
    """Read a checkpoint's metadata without its tensors.

    Raises:
        RunError: If the file does not exist or is not a checkpoint.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads(file.metadata()["metadata"])
    except UNREADABLE as error:
        raise RunError(f"{path} is not a checkpoint ({error}). Choose another one.") from None


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the trainable parameters by name; frozen ones are not saved."""
    return {name: weight for name, weight in module.named_parameters() if weight.requires_grad}


def load_weights(module: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Copy a checkpoint's weights into a module of the same shape.

    Args:
        path: The file, for the error message.

    Raises:
        RunError: If a parameter is missing, or has another shape or dtype.
    """
    parameters = weights(module)
    for name, parameter in parameters.items():
        saved = tensors.get(name)
        if saved is None or (saved.shape, saved.dtype) != (parameter.shape, parameter.dtype):
            found = "missing" if saved is None else f"{saved.dtype} {tuple(saved.shape)}"
            raise RunError(
                f"{path} is of another model: {name!r} is {found}, expected {parameter.dtype} "
                f"{tuple(parameter.shape)}. Restore the file that the run wrote."
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def optimizer_tensors(
    optimizer: Optimizer, gather: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> dict[str, Tensor]:
    """Return the tensors of an optimizer's state, by name.

    Args:
        gather: Returns the whole of a tensor of which this process has a part.
    """
    tensors: dict[str, Tensor] = {}
    flatten_state(optimizer.state_dict(), "optimizer", tensors)
    return {name: gather(tensor) for name, tensor in tensors.items()}


def load_optimizer(
    optimizer: Optimizer,
    tree: Any,
    tensors: Mapping[str, Tensor],
    shard: Callable[[Tensor, Tensor], Tensor] = lambda whole, weight: whole,
) -> None:
    """Restore the state whose JSON part is `tree`, learning rates included.

    Args:
        shard: Returns the part of a moment of a weight that this process holds.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = unflatten_state(tree, tensors)
    for index, fields in state["state"].items():
        for name, value in fields.items():
            if isinstance(value, Tensor) and index < len(parameters):
                fields[name] = shard(value, parameters[index])
    optimizer.load_state_dict(state)


def checksum(tensors: Mapping[str, Tensor], metadata: str) -> int:
    """CRC-32 of the metadata, then of names and bytes in the order of names."""
    crc = zlib.crc32(metadata.encode())
    for name in sorted(tensors):
        raw = tensors[name].reshape(-1).view(torch.uint8).numpy()
        crc = zlib.crc32(raw, zlib.crc32(name.encode(), crc))
    return crc


def is_numbered(phase: int, keep: int | None) -> bool:
    """Return True if the weights are saved under their number: after 0, 1, 2, 4, 8, ... phases."""
    return phase & (phase - 1) == 0 and (phase == 0 or keep != 0)


def remove_outdated(directory: Path, keep: int | None, phase: int) -> None:
    """Remove numbered checkpoints up to `phase`, except that of phase 0 and the newest `keep`."""
    if keep is None:
        return
    paths = {path.stem[6:]: path for path in directory.glob("phase_*.safetensors")}
    older = sorted((n for n in paths if n.isdecimal() and 0 < int(n) <= phase), key=int)
    for number in older[: max(0, len(older) - keep)]:
        paths[number].unlink(missing_ok=True)
