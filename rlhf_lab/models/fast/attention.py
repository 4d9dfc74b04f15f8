"""Scaled dot-product attention with rotary embeddings for the packed form, over whole sequences."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rlhf_lab.models.fast.cpu_tuning import current_route
from rlhf_lab.models.transformer_lens import rotate

SHORT = 512


class Attend(NamedTuple):
    """What a block's attention needs beside its matrices.

    `rotate` turns queries and keys by their positions, as the block's own module does; None for
    models that add their positions to the embedding.
    """

    n_heads: int
    n_kv_heads: int
    d_head: int
    scale: float
    rotate: nn.Module | None


Qkv = tuple[
    Float[Tensor, "batch head seq d_head"],
    Float[Tensor, "batch kv_head seq d_head"],
    Float[Tensor, "batch kv_head seq d_head"],
]


def attend_causally(
    attend: Attend, qkv: Qkv, keep: Callable[[tuple[Tensor, Tensor]], None] | None = None
) -> Float[Tensor, "batch head seq d_head"]:
    """Attention of whole sequences over themselves, from position 0 on.

    `keep` receives the rotary-embedded keys and the values, to fill a KV cache.
    """
    q, k, v = qkv
    if attend.rotate is not None:
        q, k = (rotate(attend.rotate, x, slice(0, x.shape[2])) for x in (q, k))
    if keep is not None:
        keep((k, v))
    if current_route() == "oneDNN" and q.device.type == "cpu" and q.shape[2] <= SHORT:
        return _attend_by_products(attend, q, k, v)
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=attend.scale, enable_gqa=attend.n_heads != attend.n_kv_heads
    )


def _attend_by_products(
    attend: Attend,
    q: Float[Tensor, "batch head seq d_head"],
    k: Float[Tensor, "batch kv_head seq d_head"],
    v: Float[Tensor, "batch kv_head seq d_head"],
) -> Float[Tensor, "batch head seq d_head"]:
    """Causal attention as two batched products and a softmax.

    Torch's fused kernel multiplies tiles that are too small for oneDNN: where oneDNN multiplies,
    short sequences take it three to nine times as long as this, forward and backward.
    """
    batch, heads, seq, _ = q.shape
    if attend.n_kv_heads != heads:
        k, v = (x.repeat_interleave(heads // attend.n_kv_heads, dim=1) for x in (k, v))
    q, k, v = (x.reshape(batch * heads, seq, -1) for x in (q, k, v))
    later = q.new_full((seq, seq), -torch.inf).triu(1).expand(batch * heads, -1, -1)
    scores = torch.baddbmm(later, q, k.mT, alpha=attend.scale)
    return (scores.softmax(-1) @ v).view(batch, heads, seq, -1)
