"""Activation checkpointing and precision: the settings of a run's forward passes."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.cast import cast_weights
from rlhf_lab.models.device import autocast, float32_products, product_dtype
from rlhf_lab.models.hooked_model import has_hooks, named_blocks

Units = Mapping[nn.Module, nn.Module]


@dataclass
class Forward:
    """Settings of a run's forward passes."""

    dtype: torch.dtype | None = None  # of the matrix products; that of the weights if None
    recompute: bool = False  # store only the inputs of blocks, and run each again in backward
    graphs: bool = field(default=True, kw_only=True)  # replay CUDA graphs if no other code runs
    tf32: bool = field(default=False, kw_only=True)  # for float32 products on CUDA
    units: Units = field(default_factory=dict, repr=False, compare=False)  # for FSDP2, by block
    sampler: Any = field(default=None, repr=False, compare=False)  # see `static_decode`

    @classmethod
    def from_args(cls, args: RLHFArgs) -> "Forward":
        """Return the settings of a run."""
        dtype = product_dtype(args.precision)
        is_tf32, recompute = args.precision == "tf32", args.activation_checkpointing
        return cls(dtype, recompute, graphs=args.cuda_graphs, tf32=is_tf32)

    def products(self) -> AbstractContextManager[None]:
        """Return a context in which CUDA multiplies matrices in TF32 if that is set."""
        return float32_products("tf32") if self.tf32 else contextlib.nullcontext()

    @contextlib.contextmanager
    def applied(self, policy: nn.Module) -> Iterator[None]:
        """Return a context in which the policy runs with this dtype and recomputation."""
        recomputing = recomputing_blocks(policy, self.recompute, self.units)
        is_plain = not (self.recompute or self.units)
        casting = cast_weights(policy, self.dtype if is_plain else None)
        with autocast(policy.device, self.dtype), recomputing, casting:
            yield


@contextlib.contextmanager
def recomputing_blocks(
    module: nn.Module, on: bool = True, units: Units = MappingProxyType({})
) -> Iterator[None]:
    """Return a context in which blocks store only their inputs for the backward pass.

    The gradients are the same. Random numbers are not replayed. Chen et al. 2016, "Training Deep
    Nets with Sublinear Memory Cost".
    """
    if on:
        validate_unhooked_blocks(module)
    replaced = {}
    for _, block in named_blocks(module):
        if on or block in units:
            replaced[block] = vars(block).get("forward")
        if on:
            run = partial(_run_unhooked, block, block.forward)
            block.forward = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
        if block in units:
            block.forward = partial(units[block], block.forward)
    try:
        yield
    finally:
        for block, forward in replaced.items():
            del block.forward
            if forward is not None:
                block.forward = forward


def _run_unhooked(block: nn.Module, forward: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
    validate_unhooked_blocks(block)
    return forward(*inputs, **more)


def validate_unhooked_blocks(module: nn.Module) -> None:
    """Raise ConfigError if a block has a hook, which would fire again in the backward pass."""
    for name, block in named_blocks(module):
        if has_hooks(block):
            raise ConfigError(
                f"activation_checkpointing=True runs {name} again in the backward pass, where the "
                "hooks in it would fire a second time. Remove them (reset_hooks), or set "
                "activation_checkpointing=False."
            )
