"""beartype, for the import hook of jaxtyping (`--jaxtyping-packages` in pyproject.toml)."""

from collections.abc import Callable
from typing import Any

from beartype import beartype

CHECKERS: dict[tuple[object, ...], Callable[..., Any]] = {}


def beartype_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Apply `beartype`; functions within another one share a checker, as they have no body here."""
    if "<locals>" not in fn.__qualname__:
        return beartype(fn)
    key = fn.__module__, fn.__qualname__, fn.__code__.co_varnames, str(fn.__annotations__)
    if key not in CHECKERS:
        CHECKERS[key] = beartype(fn)
    return CHECKERS[key]
