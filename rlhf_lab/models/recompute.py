"""Activation checkpointing: recompute a block in the backward pass, store only its input."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.hooked_model import named_blocks
from rlhf_lab.models.hooks import has_hooks

NO_UNITS: Mapping[nn.Module, nn.Module] = MappingProxyType({})


def run_again(function: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
    """Call a function now and again in the backward pass, with the same gradients.

    Random numbers are not replayed. Chen et al. 2016, "Training Deep Nets with Sublinear Memory
    Cost".
    """
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, **more)


def validate_unhooked_blocks(module: nn.Module) -> None:
    """Raise ConfigError if a block has a hook, which would fire again in the backward pass."""
    for name, block in named_blocks(module):
        if has_hooks(block):
            raise ConfigError(
                f"activation_checkpointing=True runs {name} again in the backward pass, where the "
                "hooks in it would fire a second time. Remove them (reset_hooks), or set "
                "activation_checkpointing=False."
            )


@contextmanager
def recomputing_blocks(
    module: nn.Module, on: bool = True, units: Mapping[nn.Module, nn.Module] = NO_UNITS
) -> Iterator[None]:
    """Return a context in which blocks store only their inputs for the backward pass.

    Args:
        units: see `Forward`.

    Raises:
        ConfigError: If a hook is registered within a block.
    """
    blocks = [block for _, block in named_blocks(module) if on or block in units]
    if blocks and on:
        validate_unhooked_blocks(module)
    replaced = {block: vars(block)["forward"] for block in blocks if "forward" in vars(block)}
    for block in blocks:
        if on:
            block.forward = partial(run_again, partial(_run_unhooked, block, block.forward))
        if block in units:
            block.forward = partial(units[block], block.forward)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward
        for block, forward in replaced.items():
            block.forward = forward


def _run_unhooked(block: nn.Module, forward: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
    validate_unhooked_blocks(block)
    return forward(*inputs, **more)
