"""Hook detection: find the submodules that have hooks, and run without these for a while.

Elsewhere: the value head's hook in value_head.py, reading in training/capture.py, changing
activations in training/interventions.py.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator

from torch import nn

TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes in which torch stores the hooks of a module."""


def has_hooks(module: nn.Module) -> bool:
    """Return True if the module or one of its submodules has a hook."""
    return any(True for _ in hooked_modules(module))


def is_hooked(part: nn.Module) -> bool:
    """Return True if the module itself has a hook."""
    return any(vars(part)[table] for table in TABLES)


def hooked_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module and its submodules that have hooks."""
    yield from filter(is_hooked, module.modules())


@contextlib.contextmanager
def without_hooks(*modules: nn.Module) -> Iterator[None]:
    """Return a context in which modules have no hooks.

    Afterwards they have the same hooks as before; hooks added in the context are removed.
    """
    kept = [
        (part, name, getattr(part, name))
        for module in modules
        for part in hooked_modules(module)
        for name in TABLES
    ]
    for part, name, _ in kept:
        setattr(part, name, OrderedDict())
    try:
        yield
    finally:
        for part, name, table in kept:
            setattr(part, name, table)
