"""Shape checks for users: jaxtyping and beartype on every function of the package."""

import sys
from collections.abc import Callable
from typing import Any, get_args, no_type_check

import jaxtyping
from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

from rlhf_lab.errors import ConfigError

NEEDED_FIRST = {"rlhf_lab", "rlhf_lab.errors", "rlhf_lab.shape_checks"}
"""The modules that are there before any check can be: they take no tensor."""

_hooks: list[Any] = []
_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""`beartype`, for which a whole number is a float, too, as for every other checker of Python."""


def check_shapes() -> None:
    """Check the shapes and types of what every function of the package takes and returns.

    1. Install jaxtyping's import hook for the package, with beartype.
    2. Leave the checker's own frames out of the traceback, which begins with function and argument.

    To be called before the rest of the package is imported, as the first line of a notebook; again
    it does nothing. The environment variable RLHF_LAB_CHECK_SHAPES=1 calls it when the package is
    imported. A wrong shape then raises `jaxtyping.TypeCheckError`, which names the function, the
    parameter, what was given and what was expected. It costs time at each call: leave it out of
    long runs.

    Raises ConfigError if a module of the package has been imported without the checks.
    """
    if _hooks:
        return
    known = sorted(name for name in sys.modules if name.startswith("rlhf_lab."))
    unchecked = [name for name in known if name not in NEEDED_FIRST]
    if unchecked:
        raise ConfigError(
            f"check_shapes() comes too late for {unchecked[0]}, which is imported already; restart "
            "Python, and call it before any other import from rlhf_lab."
        )
    jaxtyping.config.update("jaxtyping_remove_typechecker_stack", True)
    _hooks.append(install_import_hook("rlhf_lab", "rlhf_lab.shape_checks.check_once"))


_checkers: dict[tuple[object, ...], Callable[..., Any]] = {}


def check_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`beartype`, compiled at the first call, and once for all definitions of an inner function.

    What jaxtyping hands in has the function's signature and no body: first one that checks the
    arguments, and then one that checks what is returned, whose arguments need no second check.
    Classes of the package are not asked for: a learner's own policy or trainer may stand in their
    place.
    """
    compiled: list[Callable[..., Any]] = []

    @no_type_check  # jaxtyping would give it axis sizes of its own
    def check(*args: Any, **kwargs: Any) -> Any:
        if not compiled:
            compiled.append(_compiled(fn))
        return compiled[0](*args, **kwargs)

    return check


def _compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The checker of a signature; that of an earlier definition if there is one."""
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
    """Whether an annotation has a class of the package in it, or a name that is yet to look up."""
    if isinstance(annotation, str):
        return True
    own = isinstance(annotation, type) and annotation.__module__.split(".")[0] == "rlhf_lab"
    return own or any(map(_names_own_class, get_args(annotation)))
