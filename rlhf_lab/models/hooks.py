"""Hook detection: find the submodules that have hooks attached."""

from collections.abc import Iterator

from torch import nn


def has_hooks(module: nn.Module) -> bool:
    """Whether this module or a part of it has a hook, forward or backward."""
    return any(True for _ in hooked_parts(module))


def hooked_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The parts of a module, itself among them, that have hooks."""
    parts = [module]
    while parts:
        part = parts.pop()
        if part._forward_hooks or part._backward_hooks:
            yield part
        elif part._forward_pre_hooks or part._backward_pre_hooks:
            yield part
        parts.extend(child for child in part._modules.values() if child is not None)
