"""Kinds of transformer block: which components a TransformerLens model is made of."""

from collections.abc import Iterator

import torch
from torch import nn
from transformer_lens.components import (
    Attention,
    GroupedQueryAttention,
    LayerNorm,
    LayerNormPre,
    RMSNorm,
    RMSNormPre,
    TransformerBlock,
)
from transformer_lens.components.mlps.gated_mlp import GatedMLP
from transformer_lens.components.mlps.mlp import MLP

from rlhf_lab.models.transformer_lens.library import HookedTransformer

KNOWN_PARTS = (
    TransformerBlock,
    Attention,
    GroupedQueryAttention,
    MLP,
    GatedMLP,
    LayerNorm,
    LayerNormPre,
    RMSNorm,
    RMSNormPre,
)


def blocks_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The blocks of every transformer within a module, with their names in it."""
    for name, part in module.named_modules():
        if isinstance(part, TransformerBlock):
            yield name, part


def has_known_parts(model: HookedTransformer) -> bool:
    """Whether the model and the parts of its blocks run the code that `KNOWN_PARTS` have."""
    return type(model).forward is HookedTransformer.forward and all(
        any(type(part).forward is known.forward for known in KNOWN_PARTS)
        for block in model.blocks
        for part in (block, block.attn, block.mlp, block.ln1, block.ln2)
    )


def is_gated(mlp: nn.Module) -> bool:
    """Whether an MLP multiplies its hidden layer by a gate."""
    return isinstance(mlp, GatedMLP)


def is_centered(norm: nn.Module) -> bool:
    """Whether a norm takes the mean away before it scales: LayerNorm does, RMSNorm does not."""
    return isinstance(norm, LayerNorm | LayerNormPre)


def key_value_weights(attn: nn.Module) -> tuple[torch.Tensor, ...]:
    """W_K, W_V, b_K and b_V, with as many heads as are stored (fewer than queries, if grouped)."""
    own = "_" if isinstance(attn, GroupedQueryAttention) else ""
    return tuple(getattr(attn, f"{own}{name}") for name in ("W_K", "W_V", "b_K", "b_V"))
