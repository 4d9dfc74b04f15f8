"""Checkpoints: weights and training state as safetensors with a checksum, never pickle.

Numbers, texts and containers of a state are stored as JSON in the header of the file. A thread
writes copies of the training state while the run continues.
"""

import dataclasses
import json
import threading
import warnings
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.files import partial_file

if TYPE_CHECKING:
    from rlhf_lab.training.trainer import RLHFTrainer

UNREADABLE = (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError)
CONTAINERS = {"list": list, "tuple": tuple, "dict": dict, "Counter": Counter}
FROZEN = "the frozen base model"  # of adapters, which a checkpoint lacks
STATEFUL = ("optimizer", "scheduler", "kl_controller")


def save_checkpoint(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, Any], flush: bool = True
) -> None:
    """Write tensors, and metadata as JSON in the header; an earlier file is intact on an error."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(metadata)
    header = {"metadata": text, "crc32": str(checksum(tensors, text))}
    with partial_file(path, flush=flush) as partial:
        try:
            save_file(tensors, partial, metadata=header)
        except SafetensorError as error:
            raise OSError(str(error)) from error


def load_checkpoint(path: Path, **origin: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and metadata, after a save in progress; RunError if they are not of `origin`."""
    wait_for_writers(path.parent)
    if not path.is_file():
        names = sorted(f.stem for f in path.parent.glob("*.safetensors") if f.is_file())
        available = f"Available: {', '.join(names)} (see `export`)." if names else "None was saved."
        raise RunError(f"No checkpoint {path}. {available}")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if int(header["crc32"]) != checksum(tensors, header["metadata"]):
            raise ValueError("checksum differs")
        metadata = json.loads(header["metadata"])
    except UNREADABLE as error:
        other = "last" if path.stem == "best" else "best"
        raise RunError(
            f"{path} is corrupt ({error}). Restore the file, or use another one: a new run can "
            f"start from `export RUN OUT --checkpoint {other}`."
        ) from None
    found = {name: metadata.get(name) for name in origin}
    if found != origin:
        raise RunError(f"{path} is of {found}, expected {origin}. Restore the file.")
    return tensors, metadata


def read_metadata(path: Path) -> dict[str, Any]:
    """Read a checkpoint's metadata without its tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads(file.metadata()["metadata"])
    except UNREADABLE as error:
        raise RunError(f"{path} is not a checkpoint ({error}). Choose another one.") from None


def checksum(tensors: Mapping[str, Tensor], metadata: str = "") -> int:
    """CRC-32 of the metadata, then of names and bytes in the order of names."""
    crc = zlib.crc32(metadata.encode())
    for name in sorted(tensors):
        raw = tensors[name].reshape(-1).view(torch.uint8).numpy()
        crc = zlib.crc32(raw, zlib.crc32(name.encode(), crc))
    return crc


def checksum_model(model: nn.Module, all_weights: bool = False) -> int:
    """Return a checksum of the first 256 numbers of each weight that a checkpoint lacks, or all."""
    is_known = lambda x: not (x.is_meta or nn.parameter.is_lazy(x))
    found = {name: x for name, x in model.named_parameters() if all_weights or not x.requires_grad}
    return checksum({k: x.detach().flatten()[:256].cpu() for k, x in found.items() if is_known(x)})


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the trainable parameters by name; frozen ones are not saved."""
    return {name: weight for name, weight in module.named_parameters() if weight.requires_grad}


@torch.no_grad()
def load_weights(
    module: nn.Module, tensors: Mapping[str, Tensor], path: Path, prefix: str = ""
) -> None:
    """Copy a checkpoint's weights, whose names begin with `prefix`, into a module."""
    parameters = weights(module)
    for name, parameter in parameters.items():
        saved = tensors.get(prefix + name)
        if saved is None or (saved.shape, saved.dtype) != (parameter.shape, parameter.dtype):
            found = "missing" if saved is None else f"{saved.dtype} {tuple(saved.shape)}"
            raise RunError(
                f"{path} is of another model: {prefix + name!r} is {found}, expected "
                f"{parameter.dtype} {tuple(parameter.shape)}. Restore the file that the run wrote."
            )
    for name, parameter in parameters.items():
        parameter.copy_(tensors[prefix + name])


def flatten_state(state: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return `state` as JSON; add each tensor in it to `tensors`, under its path from `name`."""
    kind = type(state).__name__
    if state is None or type(state) in (bool, int, float, str):
        return state
    if isinstance(state, Tensor):
        tensors[name] = state
        return {"Tensor": name}
    if CONTAINERS.get(kind) is not type(state):
        raise ConfigError(
            f"{name} is a {kind}, which a checkpoint cannot store. Define state_dict() and "
            "load_state_dict() with numbers, texts, lists, dicts and tensors only."
        )
    items = state.items() if isinstance(state, dict) else enumerate(state)
    values = [[key, flatten_state(value, f"{name}.{key}", tensors)] for key, value in items]
    return {kind: values if isinstance(state, dict) else [value for _, value in values]}


def unflatten_state(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "Tensor":
        return tensors[content]
    if kind in ("list", "tuple"):
        return CONTAINERS[kind](unflatten_state(value, tensors) for value in content)
    return CONTAINERS[kind]({key: unflatten_state(value, tensors) for key, value in content})


def make_training_state(trainer: "RLHFTrainer") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the state of optimizer, scheduler and KL controller, as JSON and tensors."""
    tree, tensors = {}, {}
    for name in STATEFUL:
        component = getattr(trainer, name)
        state = component.state_dict() if hasattr(component, "state_dict") else vars(component)
        state = flatten_state(state, name, tensors)
        tree[name] = {"class": type(component).__qualname__, "state": state}
    return tree, tensors


def make_metadata(trainer: "RLHFTrainer", name: str, phase: int) -> dict[str, Any]:
    return {
        "run": trainer.recorder.run_id,
        "name": name,
        "phase": phase,
        "args": trainer.args.to_dict(),
        "best": trainer.recorder.best,
        "reward_moments": dataclasses.asdict(trainer.rewards.moments),
        "reference_phase": trainer.reference_phase,
    }


def is_numbered(phase: int, keep: int | None = None) -> bool:
    """Return True for 0, 1, 2, 3, 5, 8, ...: the phases of numbered checkpoints and of records."""
    numbered, following = 0, 1
    while numbered < phase:
        numbered, following = following, numbered + following
    return numbered == phase and (phase == 0 or keep != 0)


def numbered_checkpoints(directory: Path) -> dict[int, Path]:
    """Return the numbered checkpoints by their phase, the earliest first."""
    paths = {path.stem[6:]: path for path in directory.glob("phase_*.safetensors")}
    return {int(n): paths[n] for n in sorted(filter(str.isdecimal, paths), key=int)}


def remove_outdated(directory: Path, keep: int | None, phase: int) -> None:
    """Remove numbered checkpoints up to `phase`, except that of phase 0 and the newest `keep`."""
    if keep is None:
        return
    older = [path for n, path in numbered_checkpoints(directory).items() if 0 < n <= phase]
    for path in older[: max(0, len(older) - keep)]:
        path.unlink(missing_ok=True)


def copied_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous copies in host memory: for CUDA pinned, with one wait."""
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies[name] = copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)
    return copies


class CheckpointWriter:
    """Runs one save at a time in a thread, which the process waits for before it exits."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._errors: list[Exception] = []
        weakref.finalize(self, _warn, self._errors)  # if nobody waits

    def start(self, directory: Path, save: Callable[[], None]) -> None:
        """Wait for the previous save, then call `save` in a thread. It writes to `directory`."""
        self.wait()
        errors = self._errors

        def run() -> None:
            try:
                save()
            except Exception as error:
                errors.append(error)

        self._thread = threading.Thread(target=run, name=f"saving to {directory.resolve()}")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the save in progress, and raise its error if it failed."""
        if self._thread is not None:
            self._thread.join()
        if self._errors:
            raise self._errors.pop()


def wait_for_writers(directory: Path) -> None:
    """Wait for the threads of this process that write to a directory of checkpoints."""
    for thread in threading.enumerate():
        if thread.name == f"saving to {directory.resolve()}":
            thread.join()


def _warn(errors: list[Exception]) -> None:
    for error in errors:
        warnings.warn(str(error), stacklevel=2)
