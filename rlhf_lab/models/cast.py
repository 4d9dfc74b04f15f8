"""Weights of matrix products in another dtype: all in one pass over memory, or padded for CUDA."""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlhf_lab.models.hooked_model import has_hooks
from rlhf_lab.models.hooked_transformer import MLP, Attention, pad_vocabulary

ParameterSlot = tuple[dict[str, Any], str]  # the table of a module's parameters, and a name in it


class Cast(torch.autograd.Function):
    """`x.to(dtype)` for many tensors, with a few kernels instead of one for each."""

    @staticmethod
    def forward(ctx, dtype, *tensors):
        """Copy all tensors."""
        ctx.dtype = tensors[0].dtype
        return tuple(copied(tensors, dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        """Copy all gradients back."""
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
    return (
        dtype not in (None, weight.dtype) and weight.device.type == "cuda" and not has_hooks(module)
    )


@contextlib.contextmanager
def cast_weights(module: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Return a context in which the weights of products are in the dtype of autocast."""
    slots = product_slots(module) if casts_at_once(module, dtype) else []
    weights = [table[name] for table, name in slots]
    with replaced(slots, Cast.apply(dtype, *weights) if slots else []):
        yield


class StaticWeights:
    """Copies of a model's weights at fixed addresses, in the dtype of products.

    Args:
        pads: also copy the unembedding, with a padded vocabulary (see `pad_vocabulary`).
    """

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
        """Return a context in which the model runs with the copies."""
        table = self.unembed._parameters
        unembedding = [(table, "W_U"), (table, "b_U")] if self.pads else []
        return replaced([*self.slots, *unembedding], self.tensors)

    def refresh(self) -> None:
        """Copy the current weights."""
        torch._foreach_copy_(self.tensors, self.sources())
