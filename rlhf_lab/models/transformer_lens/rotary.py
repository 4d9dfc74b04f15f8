"""Rotary position embeddings: TransformerLens's tables of cosines and sines, and their use."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens import HookedTransformer


def make_room_for(model: HookedTransformer, n_positions: int) -> None:
    """Let the rotary tables reach so many positions; TransformerLens begins with 2048 of them."""
    if model.cfg.positional_embedding_type != "rotary":
        return
    for block in model.blocks:
        if len(block.attn.rotary_cos) < n_positions:
            block.attn._extend_rotary_embeddings(min(n_positions, model.cfg.n_ctx))


def rotate(
    attn: nn.Module,
    x: Float[Tensor, "batch head seq d_head"],
    positions: slice | Int[Tensor, "batch seq"],
) -> Float[Tensor, "batch head seq d_head"]:
    """Turn queries or keys by their positions (Su et al. 2021, RoPE), with the module's tables."""
    cos, sin = attn.rotary_cos[positions], attn.rotary_sin[positions]
    if cos.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    turning, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    turned = turning * cos + attn.rotate_every_two(turning) * sin
    return torch.cat([turned.to(x.dtype), rest], dim=-1)
