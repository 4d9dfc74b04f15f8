"""Results of callbacks: a dict becomes a JSON line in the run's directory."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from rlhf_lab.errors import ConfigError

MOST_NUMBERS = 100_000


def function_name(function: Callable[..., Any]) -> str:
    """Return a function's name in letters, digits and _, so that it can name a file.

    A partial has the name of its function, a callable object that of its class.
    """
    function = getattr(function, "func", function)
    name = getattr(function, "__name__", type(function).__name__)
    return "".join(c if c.isalnum() or c == "_" else " " for c in name).strip().replace(" ", "_")


def to_json(value: Any, place: str) -> Any:
    """Return a value as JSON: tensors and arrays as lists, non-finite numbers as None.

    Args:
        place: of the value, for the message.

    Raises:
        ConfigError: If JSON has no such type, or a tensor has over 100,000 numbers.
    """
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{place} has the key {key!r}; write keys as str.")
        return {key: to_json(entry, f"{place}[{key!r}]") for key, entry in value.items()}
    if isinstance(value, Tensor | np.ndarray | np.generic):
        size = math.prod(value.shape)
        if size > MOST_NUMBERS:
            raise ConfigError(
                f"{place} has {size:,} numbers, more than {MOST_NUMBERS:,}; return their mean or "
                "norm."
            )
        return to_json(value.tolist(), place)
    if isinstance(value, list | tuple):
        return [to_json(entry, f"{place}[{i}]") for i, entry in enumerate(value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    raise ConfigError(
        f"{place} is a {type(value).__name__}, which cannot be stored; return numbers, words, "
        "tensors, and lists or dicts of these."
    )
