"""Activation checkpointing: recompute a block in the backward pass, store only its input."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.hooks import has_hooks
from rlhf_lab.models.transformer_lens import blocks_of

NO_UNITS: Mapping[nn.Module, nn.Module] = MappingProxyType({})
"""No block is run within anything; see `Forward.units`."""


def run_again(function: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
    """Call a function now, and once more in the backward pass, from its inputs alone.

    Gradients are those of calling it once. Nothing here draws random numbers, so none are replayed.

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
    """
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, **more)


def refuse_hooked_blocks(module: nn.Module) -> None:
    """Raise ConfigError for a hook within a block: it would fire again in the backward pass."""
    for name, block in blocks_of(module):
        if has_hooks(block):
            raise ConfigError(
                f"activation_checkpointing=True runs {name} again in the backward pass, where the "
                "hooks in it would fire a second time; take them off (reset_hooks), or set "
                "activation_checkpointing=False."
            )


@contextmanager
def recomputing_blocks(
    module: nn.Module, on: bool = True, units: Mapping[nn.Module, nn.Module] = NO_UNITS
) -> Iterator[None]:
    """Let the hooked blocks of a module keep their inputs only, in forwards made in here.

    Args:
        units: what each block is to be run within; see `Forward`.

    Raises:
        ConfigError: a hook is attached within a block, now or when it is run again.
    """
    blocks = [block for _, block in blocks_of(module) if on or block in units]
    if blocks and on:
        refuse_hooked_blocks(module)
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
    """Call a block's forward, now or in the backward pass, if no hook is within."""
    refuse_hooked_blocks(block)
    return forward(*inputs, **more)
