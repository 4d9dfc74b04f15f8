"""Dispatch by name: look up a function in a table, and match arguments to its parameters."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor


def look_up(
    choice: str | Callable[..., Any], table: Mapping[str, Callable[..., Any]], field: str
) -> Callable[..., Any]:
    """Return the function of that name, or `choice` itself if it is callable."""
    if callable(choice):
        return choice
    if choice not in table:
        names = ", ".join(table)
        raise ValueError(f"Unknown {field} {choice!r}. Choose one of: {names}, or pass a function.")
    return table[choice]


def call_by_name(
    function: Callable[..., Any],
    available: Mapping[str, Any],
    field: str,
    in_order: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> Any:
    """Call a function with those of the available values that its parameters name.

    Values that are None, or bound by `functools.partial`, are left out. A function of only `*args`
    gets those of `in_order`. Raises ValueError for a parameter without value, or a useless setting.
    """
    name, parameters = _name(function), inspect.signature(function).parameters.values()
    kinds = {p.kind for p in parameters}
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    accepted = {p.name for p in named}
    required = [p.name for p in named if p.default is p.empty]
    values = {n: x for n, x in (settings or {}).items() if x is not None}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        accepted |= values.keys() | available.keys()
    for n in values:
        if n not in accepted:
            raise ValueError(f"{field} {name} has no parameter {n!r}. Set {n} to None.")
    if inspect.Parameter.VAR_POSITIONAL in kinds and not required:
        return function(*(available[n] for n in in_order))
    bound = getattr(function, "keywords", {})
    values |= {n: x for n, x in available.items() if x is not None and n not in bound}
    missing = [n for n in required if n not in values]
    if missing:
        raise ValueError(
            f"{field}: no value for the parameter {missing[0]!r} of {name}. Use only the "
            f"parameters: {', '.join(values)}."
        )
    return function(**{n: x for n, x in values.items() if n in accepted})


def check_result(field: str, result: Any, shape: Sequence[int], per: str = "token") -> Tensor:
    """Return the result of a custom function; raise ValueError unless it is floats of a shape."""
    if isinstance(result, Tensor) and result.is_floating_point() and result.shape == shape:
        return result
    is_tensor, got = isinstance(result, Tensor), f"{type(result).__name__} {result!r:.40}"
    got = f"shape {tuple(result.shape)} of {result.dtype}" if is_tensor else got
    wanted = f"one number per {per} in a float tensor of shape {tuple(shape)}"
    raise ValueError(f"{field} returned {got}. Return {wanted}.")


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", str(function))
