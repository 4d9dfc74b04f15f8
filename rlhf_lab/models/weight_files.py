"""The files of a model's weights: what they must hold before and after a model is made of them."""

import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedModel

from rlhf_lab.errors import LoadError

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""What weights are stored as; whole numbers are packed, and mean nothing without their scales."""
SURELY_MADE = 10_000_000
"""Numbers of a model that are made without a look at how many its files hold."""
LAYER = re.compile(r"\.\d+\.")


def check_files(loader: type, name: str, place: str) -> None:
    """Refuse files of which no model can come, before memory is taken for it.

    Raises:
        LoadError: the weights are pickled, or many fewer than its configuration describes; or that
            is no object.
    """
    pickled = sorted(path.name for path in Path(place).glob("*.bin"))
    if pickled and not any(Path(place).glob("model*.safetensors")):
        raise LoadError(
            f"{name!r} has its weights in {pickled[0]}, which is pickled and could run code; save "
            "them as safetensors with a copy of transformers that you trust it to."
        )
    held = sum(math.prod(shape) for _, shape in stored(place).values())
    if Path(place, "config.json").read_bytes().lstrip()[:1] not in (b"{", b""):
        raise LoadError(f"config.json of {name!r} holds no settings; restore it.")
    config = AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        made = loader.from_config(config, trust_remote_code=False)
    described = sum(parameter.numel() for parameter in made.parameters())
    if described > 2 * held + SURELY_MADE:
        raise LoadError(
            f"config.json of {name!r} describes a model of {described:,} numbers, but its files "
            f"hold {held:,}; put the configuration beside the weights that it belongs to."
        )


def check_loaded(model: PreTrainedModel, report: dict[str, Any], name: str, what: str) -> None:
    """Refuse a model that is not what its files hold.

    Raises:
        LoadError: weights lack, have another shape, or stand for layers that the configuration
            leaves out; or some are not finite.
    """
    missing, other = sorted(report["missing_keys"]), sorted(report["mismatched_keys"])
    if missing:
        raise LoadError(
            f"the files of {name!r} are not a {what}: they lack {len(missing)} weights, "
            f"{missing[0]} among them; give a whole one."
        )
    if other:
        weight, stored_as, described = other[0]
        raise LoadError(
            f"the weight {weight} of {name!r} has the shape {list(stored_as)}, by its config.json "
            f"{list(described)}; put the configuration beside the weights that it belongs to."
        )
    parameters = dict(model.named_parameters())
    layered = {LAYER.sub(".", parameter) for parameter in parameters if LAYER.search(parameter)}
    for weight in sorted(report["unexpected_keys"]):
        if LAYER.search(weight) and (not layered or _among(LAYER.sub(".", weight), layered, model)):
            raise LoadError(
                f"the files of {name!r} hold {weight}, of a layer that its config.json leaves out; "
                "correct the number of layers there."
            )
    broken = next((key for key, value in parameters.items() if not value.isfinite().all()), None)
    if broken:
        raise LoadError(f"the weight {broken} of {name!r} holds nan or inf; use a whole model.")


def check_numbers(model: PreTrainedModel, name: str, place: str) -> None:
    """Refuse weights that are stored as something else than floating-point numbers.

    Raises:
        LoadError: such a weight, by its name.
    """
    names = {parameter for parameter, _ in model.named_parameters()}
    for weight, (dtype, _) in stored(place).items():
        if dtype not in FLOATS and _among(weight, names, model):
            raise LoadError(
                f"the weight {weight} of {name!r} is stored as {dtype}, which is no floating-point "
                "number; save the model in float32, float16 or bfloat16."
            )


def stored(place: str) -> dict[str, tuple[str, list[int]]]:
    """Kind and shape of each tensor in a directory's weights; a broken file is left to the load."""
    found = {}
    for path in sorted(Path(place).glob("model*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    entry = file.get_slice(name)
                    found[name] = entry.get_dtype(), entry.get_shape()
        except (OSError, SafetensorError):
            continue
    return found


def _among(weight: str, names: set[str], model: PreTrainedModel) -> bool:
    """Whether a weight is one of these, saved with or without the name of the model's base."""
    prefix = f"{model.base_model_prefix}."
    return bool({weight, prefix + weight, weight.removeprefix(prefix)} & names)
