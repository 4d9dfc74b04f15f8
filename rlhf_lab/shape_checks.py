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
    known = sorted(name for name in sys.modules if name.startswith("rlhf_lab."))
    unchecked = [name for name in known if name not in NEEDED_FIRST]
    if unchecked:
        raise ConfigError(
            f"check_shapes() comes too late for {unchecked[0]}, which is already imported. Restart "
            "Python, and call it before any other import from rlhf_lab."
        )
    jaxtyping.config.update("jaxtyping_remove_typechecker_stack", True)
    _hooks.append(install_import_hook("rlhf_lab", "rlhf_lab.shape_checks.check_once"))


_checkers: dict[tuple[object, ...], Callable[..., Any]] = {}


def check_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Apply beartype at the first call, and once for all definitions of an inner function.

    jaxtyping passes functions with the signature and no body: one that checks the arguments, and
    one that checks the result. Classes of the package are not checked, so a custom policy or
    trainer can replace them.
    """
    compiled: list[Callable[..., Any]] = []

    @no_type_check  # jaxtyping would give it axis sizes of its own
    def check(*args: Any, **kwargs: Any) -> Any:
        if not compiled:
            compiled.append(_compiled(fn))
        return compiled[0](*args, **kwargs)

    return check


def _compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the checker of a signature, or that of an earlier definition."""
    asked = {
        name: Any if _names_own_class(annotation) else annotation
        for name, annotation in fn.__annotations__.items()
    }
    returned = asked.get("return", Any)
    if returned is not Any:
        asked = dict.fromkeys(asked, Any) | {"return": returned}
    fn.__annotations__ = asked
    if "<locals>" not in fn.__qualname__:
        return _beartype(fn)
    key = fn.__module__, fn.__qualname__, fn.__code__.co_varnames, str(asked)
    if key not in _checkers:
        _checkers[key] = _beartype(fn)
    return _checkers[key]


def _names_own_class(annotation: Any) -> bool:
    """Return True if an annotation contains a class of the package or an unresolved name."""
    if isinstance(annotation, str):
        return True
    own = isinstance(annotation, type) and annotation.__module__.split(".")[0] == "rlhf_lab"
    return own or any(map(_names_own_class, get_args(annotation)))
