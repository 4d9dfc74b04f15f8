"""Hook detection: find the submodules that have hooks, and run without these for a while.

Elsewhere: the value head's hook in value_head.py, reading in training/capture.py, changing
activations in training/interventions.py, the hook points of the packed form in fast/known.py.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator

from torch import nn

TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where torch keeps the hooks of a module."""


def has_hooks(module: nn.Module) -> bool:
    """Whether this module or a part of it has a hook, forward or backward."""
    return any(True for _ in hooked_parts(module))


def is_hooked(part: nn.Module) -> bool:
    """Whether this very module has a hook, forward or backward."""
    return any(vars(part)[table] for table in TABLES)


def hooked_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The parts of a module, itself among them, that have hooks."""
    parts = [module]
    while parts:
        part = parts.pop()
        # `is_hooked`, written out: every decision between packed and hooked walks over all parts
        own = part.__dict__
        if (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
        ):
            yield part
        if own["_modules"]:
            parts.extend(child for child in own["_modules"].values() if child is not None)


@contextlib.contextmanager
def without_hooks(*modules: nn.Module) -> Iterator[None]:
    """Run modules as if they had no hooks; afterwards every hook is there as before.

    Hooks that are added inside, and not taken off again, are gone afterwards.
    """
    kept = [
        (part, name, getattr(part, name))
        for module in modules
        for part in hooked_parts(module)
        for name in TABLES
    ]
    for part, name, _ in kept:
        setattr(part, name, OrderedDict())
    try:
        yield
    finally:
        for part, name, table in kept:
            setattr(part, name, table)
