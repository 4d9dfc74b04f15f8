"""The transformer in fewer and larger operations: the same numbers, with the main hook points."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens import HookedTransformer
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
from transformer_lens.hook_points import HookPoint

from rlhf_lab.machine import current_route
from rlhf_lab.models.hooks import hooked_parts
from rlhf_lab.models.recompute import refuse_hooked_blocks, run_again

GELU_TANH = partial(F.gelu, approximate="tanh")
ACTIVATIONS = MappingProxyType(
    {
        "gelu_new": GELU_TANH,
        "gelu_pytorch_tanh": GELU_TANH,
        "gelu": F.gelu,
        "silu": F.silu,
        "relu": F.relu,
    }
)
SHORT = 512
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
UNUSUAL = (
    "attn_only",
    "parallel_attn_mlp",
    "use_qk_norm",
    "use_local_attn",
    "use_normalization_before_and_after",
    "use_split_qkv_input",
    "use_attn_in",
    "use_hook_tokens",
    "use_attention_sinks",
    "use_logn_attn",
    "use_dynamic_ntk_rope",
    "post_embedding_ln",
    "load_in_4bit",
    "clip_qkv",
)
PASSED = (
    "hook_resid_pre",
    "attn.hook_q",
    "attn.hook_k",
    "attn.hook_v",
    "attn.hook_z",
    "hook_attn_out",
    "hook_resid_mid",
    "mlp.hook_pre",
    "mlp.hook_post",
    "hook_mlp_out",
    "hook_resid_post",
)
"""The hook points of a block that its packed form passes, with the shapes of the modules."""


def can_pack(model: HookedTransformer) -> bool:
    """Whether the packed form knows every part of this model: GPT-2 and Llama shapes do.

    Anything unusual, a block that was replaced or a setting that is not listed here, runs as the
    hooked modules instead.
    """
    cfg = model.cfg
    return (
        cfg.normalization_type in ("LN", "LNPre", "RMS", "RMSPre")
        and cfg.positional_embedding_type in ("standard", "rotary")
        and cfg.attention_dir == "causal"
        and cfg.act_fn in ACTIVATIONS
        and cfg.n_devices == 1
        and cfg.attn_scores_soft_cap <= 0
        and cfg.output_logits_soft_cap <= 0
        and not any(getattr(cfg, name, None) for name in UNUSUAL)
        and type(model).forward is HookedTransformer.forward
        and all(_is_known(block) for block in model.blocks)
    )


def runs_packed(*models: HookedTransformer) -> bool:
    """Whether these models may run in packed form: it knows them, and passes whatever is hooked.

    It passes the embedding and, in every block, what `PASSED` lists. Who listens elsewhere, to the
    attention pattern say, is served by the hooked modules.
    """
    return all(can_pack(model) and _passes_hooks(model) for model in models)


def _passes_hooks(model: HookedTransformer) -> bool:
    hooked = list(hooked_parts(model))
    if not hooked:
        return True
    passed = {model.hook_embed}
    passed.update(block.get_submodule(name) for block in model.blocks for name in PASSED)
    return passed.issuperset(hooked)


def _is_known(block: nn.Module) -> bool:
    parts = (block, block.attn, block.mlp, block.ln1, block.ln2)
    return all(any(type(part).forward is known.forward for known in KNOWN_PARTS) for part in parts)


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


class PackedBlock(NamedTuple):
    """The weights of one block as the matrices that are multiplied with.

    `W_qkv` is `[d_model, (heads + 2 kv_heads) * d_head]`, so that queries, keys and values are one
    product; the other matrices are views of the block's own. `W_gate` is None without a gate.
    `heard` holds the hook points that somebody listened to when the block was packed.
    """

    norm1: Callable[[Tensor], Tensor]
    W_qkv: Float[Tensor, "d_model qkv"]
    b_qkv: Float[Tensor, " qkv"]
    attend: Attend
    W_O: Float[Tensor, "z d_model"]
    b_O: Float[Tensor, " d_model"]
    norm2: Callable[[Tensor], Tensor]
    W_in: Float[Tensor, "d_model d_mlp"]
    b_in: Float[Tensor, " d_mlp"]
    W_gate: Float[Tensor, "d_model d_mlp"] | None
    activation: Callable[[Tensor], Tensor]
    W_out: Float[Tensor, "d_mlp d_model"]
    b_out: Float[Tensor, " d_model"]
    heard: Mapping[str, HookPoint]


def pack(model: HookedTransformer, dtype: torch.dtype | None = None) -> list[PackedBlock]:
    """Lay out the weights of all blocks; gradients flow back to the model's own parameters.

    Args:
        dtype: what the matrix products are done in; norms, attention's softmax and the residual
            stream stay as they are.
    """
    return [_pack_block(block, dtype or model.cfg.dtype) for block in model.blocks]


def _pack_block(block: TransformerBlock, dtype: torch.dtype) -> PackedBlock:
    attn, mlp = block.attn, block.mlp
    own = "_" if isinstance(attn, GroupedQueryAttention) else ""
    matrices = [attn.W_Q, getattr(attn, f"{own}W_K"), getattr(attn, f"{own}W_V")]
    biases = [attn.b_Q, getattr(attn, f"{own}b_K"), getattr(attn, f"{own}b_V")]
    W_qkv = torch.cat([W.to(dtype).transpose(0, 1) for W in matrices], dim=1)
    rotary = attn.cfg.positional_embedding_type == "rotary"
    return PackedBlock(
        norm1=make_norm(block.ln1),
        W_qkv=W_qkv.flatten(1),
        b_qkv=torch.cat([b.to(dtype).flatten() for b in biases]),
        attend=Attend(
            n_heads=len(matrices[0]),
            n_kv_heads=len(matrices[1]),
            d_head=attn.cfg.d_head,
            scale=1 / attn.attn_scale,
            rotate=attn if rotary else None,
        ),
        W_O=attn.W_O.to(dtype).flatten(0, 1),
        b_O=attn.b_O.to(dtype),
        norm2=make_norm(block.ln2),
        W_in=mlp.W_in.to(dtype),
        b_in=mlp.b_in.to(dtype),
        W_gate=mlp.W_gate.to(dtype) if isinstance(mlp, GatedMLP) else None,
        activation=ACTIVATIONS[mlp.cfg.act_fn],
        W_out=mlp.W_out.to(dtype),
        b_out=mlp.b_out.to(dtype),
        heard=_heard(block),
    )


def _heard(block: TransformerBlock) -> dict[str, HookPoint]:
    hooked = set(hooked_parts(block))
    points = ((name, block.get_submodule(name)) for name in PASSED if hooked)
    return {name: point for name, point in points if point in hooked}


def make_norm(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    """A norm of TransformerLens as one operation of torch."""
    shape, eps = (norm.cfg.d_model,), norm.eps
    if isinstance(norm, LayerNorm | LayerNormPre):
        weight, bias = getattr(norm, "w", None), getattr(norm, "b", None)
        return lambda x: F.layer_norm(x, shape, weight, bias, eps)
    weight = getattr(norm, "w", None)
    return lambda x: F.rms_norm(x, shape, weight, eps)


Qkv = tuple[
    Float[Tensor, "batch head seq d_head"],
    Float[Tensor, "batch kv_head seq d_head"],
    Float[Tensor, "batch kv_head seq d_head"],
]


def run_block(
    packed: PackedBlock,
    residual: Float[Tensor, "batch seq d_model"],
    attention: Callable[[Qkv], Float[Tensor, "batch head seq d_head"]],
) -> Float[Tensor, "batch seq d_model"]:
    """One block of the transformer, with attention over whatever keys `attention` has.

    1. Norm, then queries, keys and values in one product; attention; back to the residual.
    2. Norm, then the MLP, with or without a gate; back to the residual.

    On the way every hook point of `PASSED` is called that somebody listens to.
    """
    batch, seq, _ = residual.shape

    def at(name: str, x: Tensor) -> Tensor:
        point = packed.heard.get(name)
        return x if point is None else point(x.unflatten(0, (batch, seq))).flatten(0, 1)

    x = at("hook_resid_pre", residual.flatten(0, 1))
    heads = _linear(packed.norm1(x), packed.W_qkv, packed.b_qkv)
    heads = heads.view(batch * seq, -1, packed.attend.d_head)
    sizes = (packed.attend.n_heads, packed.attend.n_kv_heads, packed.attend.n_kv_heads)
    q, k, v = (
        at(f"attn.hook_{name}", part).view(batch, seq, -1, packed.attend.d_head).transpose(1, 2)
        for name, part in zip("qkv", heads.split(sizes, dim=1), strict=True)
    )
    z = at("attn.hook_z", attention((q, k, v)).transpose(1, 2).flatten(0, 1))
    x = x + at("hook_attn_out", _linear(z.flatten(1), packed.W_O, packed.b_O))
    x = at("hook_resid_mid", x)
    x = x + at("hook_mlp_out", _mlp(packed, packed.norm2(x), at))
    return at("hook_resid_post", x).view(batch, seq, -1)


def _mlp(
    packed: PackedBlock,
    x: Float[Tensor, "n d_model"],
    at: Callable[[str, Tensor], Tensor],
) -> Float[Tensor, "n d_model"]:
    if packed.W_gate is None:
        post = packed.activation(at("mlp.hook_pre", _linear(x, packed.W_in, packed.b_in)))
    else:
        x = x.to(packed.W_in.dtype)
        gate = packed.activation(at("mlp.hook_pre", x @ packed.W_gate))
        post = gate * (x @ packed.W_in) + packed.b_in
    return _linear(at("mlp.hook_post", post), packed.W_out, packed.b_out)


def _linear(
    x: Float[Tensor, "n inner"], W: Float[Tensor, "inner outer"], b: Float[Tensor, " outer"]
) -> Float[Tensor, "n outer"]:
    return torch.addmm(b, x.to(W.dtype), W)


def attend_causally(
    attend: Attend, qkv: Qkv, keep: Callable[[tuple[Tensor, Tensor]], None] | None = None
) -> Float[Tensor, "batch head seq d_head"]:
    """Attention of whole sequences over themselves, from position 0 on.

    `keep` gets keys, turned by their positions, and values, for whoever wants to go on from here.
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


def embed(
    model: HookedTransformer,
    tokens: Int[Tensor, "batch seq"],
    positions: slice | Int[Tensor, "batch seq"],
) -> Float[Tensor, "batch seq d_model"]:
    """The residual stream before the first block."""
    residual = model.hook_embed(F.embedding(tokens, model.W_E))
    if model.cfg.positional_embedding_type == "standard":
        residual = residual + model.W_pos[positions]
    return residual


def packed_residuals(
    model: HookedTransformer,
    tokens: Int[Tensor, "batch seq"],
    dtype: torch.dtype | None = None,
    recompute: bool = False,
) -> Float[Tensor, "batch seq d_model"]:
    """The residual stream after the last block, of sequences that begin at position 0.

    The same as running the model with `stop_at_layer=n_layers`, except that only the hook points
    of `PASSED` are passed, and that of the embedding. Padding belongs to the right, where causal
    attention never looks from.

    Args:
        recompute: keep only the residuals between blocks for the backward pass; everything within
            a block, its packed matrices included, is made there again.

    Raises:
        ConfigError: `recompute`, and a hook within a block, which would fire twice.
    """
    if recompute:
        refuse_hooked_blocks(model)
    residual = embed(model, tokens, slice(0, tokens.shape[1]))
    for block in model.blocks:
        run = partial(_pack_and_run, block, dtype or model.cfg.dtype)
        residual = run_again(run, residual) if recompute else run(residual)
    return residual


def _pack_and_run(
    block: TransformerBlock, dtype: torch.dtype, residual: Float[Tensor, "batch seq d_model"]
) -> Float[Tensor, "batch seq d_model"]:
    packed = _pack_block(block, dtype)
    return run_block(packed, residual, partial(attend_causally, packed.attend))
