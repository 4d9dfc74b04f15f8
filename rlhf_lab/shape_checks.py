"""Shape checks for users: jaxtyping and beartype on every function of the package."""

import sys
from collections.abc import Callable
from typing import Any, get_args, no_type_check

import jaxtyping
from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

from rlhf_lab.errors import ConfigError

NEEDED_FIRST = {"rlhf_lab", "rlhf_lab.errors", "rlhf_lab.shape_checks"}  # they take no tensor

_hooks: list[Any] = []
_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, too


def check_shapes() -> None:
    """Check shapes and types of all arguments and results of the package's functions.

    Call it before any other import of the package, such as in the first line of a notebook; a
    second call does nothing. The environment variable RLHF_LAB_CHECK_SHAPES=1 calls it on import. A
    wrong shape raises `jaxtyping.TypeCheckError` with function and parameter. Each call takes more
    time, so leave it out of long runs.

    Raises:
        ConfigError: If a module of the package was imported without the checks.
    """
    if _hooks:
        return
    unchecked = sorted(x for x in {*sys.modules} - NEEDED_FIRST if x.startswith("rlhf_lab."))
    if unchecked:
        raise ConfigError(
            f"check_shapes() comes too late for {unchecked[0]}, which is already imported. Restart "
            "Python, and call it before any other import from rlhf_lab."
        )
    jaxtyping.config.update("jaxtyping_remove_typechecker_stack", True)
    _hooks.append(install_import_hook("rlhf_lab", "rlhf_lab.shape_checks.check_once"))


def check_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Apply beartype at the first call, without classes of the package.

    A custom policy or trainer can so replace the package's class. jaxtyping passes functions with
    the signature and no body.
    """
    compiled: list[Callable[..., Any]] = []

    @no_type_check  # jaxtyping would bind axis sizes to it
    def check(*args: Any, **kwargs: Any) -> Any:
        if not compiled:
            hints = {k: Any if _is_ours(v) else v for k, v in fn.__annotations__.items()}
            if hints.get("return", Any) is not Any:  # jaxtyping checks arguments separately
                hints = dict.fromkeys(hints, Any) | {"return": hints["return"]}
            fn.__annotations__ = hints
            compiled.append(_beartype(fn))
        return compiled[0](*args, **kwargs)

    return check


def _is_ours(annotation: Any) -> bool:
    """Return True if an annotation contains a class of the package or an unresolved name."""
    is_class = isinstance(annotation, type) and annotation.__module__.startswith("rlhf_lab")
    return isinstance(annotation, str) or is_class or any(map(_is_ours, get_args(annotation)))
