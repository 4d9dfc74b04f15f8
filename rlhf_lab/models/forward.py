"""Activation checkpointing, precision and casts of weights: settings of a run's forward passes."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.device import autocast, product_dtype, tf32_products
from rlhf_lab.models.hooked_model import has_hooks, named_blocks
from rlhf_lab.models.hooked_transformer import MLP, Attention, pad_vocabulary

Units = Mapping[nn.Module, nn.Module]
ParameterSlot = tuple[dict[str, Any], str]  # the table of a module's parameters, and a name in it


@dataclass
class Forward:
    """Settings of a run's forward passes."""

    dtype: torch.dtype | None = None  # of the matrix products; that of the weights if None
    recompute: bool = False  # store only the inputs of blocks, and run each again in backward
    graphs: bool = field(default=True, kw_only=True)  # replay CUDA graphs if no other code runs
    tf32: bool = field(default=False, kw_only=True)  # for float32 products on CUDA
    units: Units = field(default_factory=dict, repr=False, compare=False)  # for FSDP2, by block
    sampler: Any = field(default=None, repr=False, compare=False)  # see `StaticSampler`

    @classmethod
    def from_args(cls, args: RLHFArgs) -> "Forward":
        dtype, is_tf32 = product_dtype(args.precision), args.precision == "tf32"
        return cls(dtype, args.activation_checkpointing, graphs=args.cuda_graphs, tf32=is_tf32)

    def products(self) -> AbstractContextManager[None]:
        """Return a context in which CUDA multiplies matrices in TF32 if that is set."""
        return tf32_products() if self.tf32 else contextlib.nullcontext()

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
    """Return a context in which blocks store only their inputs (Chen et al. 2016)."""
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


class Cast(torch.autograd.Function):
    """`x.to(dtype)` for many tensors, with a few kernels instead of one for each."""

    @staticmethod
    def forward(ctx, dtype, *tensors):
        ctx.dtype = tensors[0].dtype
        return tuple(copied(tensors, dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        return None, *copied(gradients, ctx.dtype)


def copied(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return contiguous copies of tensors in a dtype."""
    results = [x.new_empty(x.shape, dtype=dtype) for x in tensors]
    pairs = list(zip(results, tensors, strict=True))
    together = [pair for pair in pairs if pair[1].is_contiguous()]
    if together:  # one tensor of other strides would split the kernel
        torch._foreach_copy_(*map(list, zip(*together, strict=True)))
    for result, x in pairs:
        if not x.is_contiguous():
            result.copy_(x)
    return results


def product_slots(model: nn.Module) -> list[ParameterSlot]:
    """Return the weights and biases of all blocks that autocast converts to another dtype."""
    return [
        (part._parameters, name)
        for part in model.modules()
        if isinstance(part, Attention | MLP)
        for name in part._parameters
        if name.lstrip("_")[:2] in ("W_", "b_") and not (name == "b_in" and part.is_gated)
    ]


@contextlib.contextmanager
def replaced(slots: Sequence[ParameterSlot], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Return a context in which parameters are replaced by tensors."""
    parameters = [table[name] for table, name in slots]
    try:
        for (table, name), x in zip(slots, tensors, strict=True):
            table[name] = x
        yield
    finally:
        for (table, name), parameter in zip(slots, parameters, strict=True):
            table[name] = parameter


def casts_at_once(module: nn.Module, dtype: torch.dtype | None) -> bool:
    """Return True on CUDA if autocast would convert every weight by itself and no hook sees it."""
    weight = next(module.parameters())
    is_cast = dtype not in (None, weight.dtype) and weight.device.type == "cuda"
    return is_cast and not has_hooks(module)


@contextlib.contextmanager
def cast_weights(module: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Return a context in which the weights of products are in the dtype of autocast."""
    slots = product_slots(module) if casts_at_once(module, dtype) else []
    weights = [table[name] for table, name in slots]
    with replaced(slots, Cast.apply(dtype, *weights) if slots else []):
        yield


class StaticWeights:
    """Copies of weights at fixed addresses, in the dtype of products, the vocabulary padded."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, pads: bool = True) -> None:
        weight = next(model.parameters())
        self.pads, self.dtype = pads, dtype or weight.dtype
        is_cast = self.dtype != weight.dtype and weight.device.type == "cuda"
        self.slots = product_slots(model) if is_cast else []
        self.unembed = model.unembed
        self.tensors = copied(self.sources(), self.dtype)

    def sources(self) -> list[Tensor]:
        """Return the current weights, the unembedding padded."""
        weights = [table[name] for table, name in self.slots]
        if self.pads:
            weights += pad_vocabulary(self.unembed.W_U, self.unembed.b_U)
        return [x.detach() for x in weights]

    def applied(self) -> AbstractContextManager[None]:
        unembedding = [(self.unembed._parameters, name) for name in ("W_U", "b_U") if self.pads]
        return replaced([*self.slots, *unembedding], self.tensors)

    def refresh(self) -> None:
        torch._foreach_copy_(self.tensors, self.sources())
