"""Packed transformer blocks: fused operations, the same numbers, with the main hook points."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from rlhf_lab.models.fast.attention import Attend, Qkv, attend_causally
from rlhf_lab.models.fast.known import ACTIVATIONS, PASSED
from rlhf_lab.models.hooks import hooked_parts
from rlhf_lab.models.padding import run_left_padded
from rlhf_lab.models.recompute import NO_UNITS, refuse_hooked_blocks, run_again
from rlhf_lab.models.transformer_lens import (
    HookedTransformer,
    HookPoint,
    is_centered,
    is_gated,
    key_value_weights,
    make_room_for,
)


class PackedBlock(NamedTuple):
    """The weights of one block as the matrices that are multiplied with.

    `W_qkv` is `[d_model, (heads + 2 kv_heads) * d_head]`, so that queries, keys and values are one
    product; the other matrices are views of the block's own. `W_gate` is None without a gate.
    `heard` holds the hook points that had hooks when the block was packed.
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

    `dtype` is that of matrix products; norms, attention's softmax and the residual stream keep
    theirs.
    """
    return [_pack_block(block, dtype or model.cfg.dtype) for block in model.blocks]


def _pack_block(block: nn.Module, dtype: torch.dtype) -> PackedBlock:
    attn, mlp = block.attn, block.mlp
    W_K, W_V, b_K, b_V = key_value_weights(attn)
    matrices, biases = [attn.W_Q, W_K, W_V], [attn.b_Q, b_K, b_V]
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
        W_gate=mlp.W_gate.to(dtype) if is_gated(mlp) else None,
        activation=ACTIVATIONS[mlp.cfg.act_fn],
        W_out=mlp.W_out.to(dtype),
        b_out=mlp.b_out.to(dtype),
        heard=_heard(block),
    )


def _heard(block: nn.Module) -> dict[str, HookPoint]:
    hooked = set(hooked_parts(block))
    points = ((name, block.get_submodule(name)) for name in PASSED if hooked)
    return {name: point for name, point in points if point in hooked}


def make_norm(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    """A norm of TransformerLens as one operation of torch."""
    shape, eps = (norm.cfg.d_model,), norm.eps
    if is_centered(norm):
        weight, bias = getattr(norm, "w", None), getattr(norm, "b", None)
        return lambda x: F.layer_norm(x, shape, weight, bias, eps)
    weight = getattr(norm, "w", None)
    return lambda x: F.rms_norm(x, shape, weight, eps)


def run_block(
    packed: PackedBlock,
    residual: Float[Tensor, "batch seq d_model"],
    attention: Callable[[Qkv], Float[Tensor, "batch head seq d_head"]],
) -> Float[Tensor, "batch seq d_model"]:
    """One block of the transformer, with attention over whatever keys `attention` has.

    1. Norm, then queries, keys and values in one product; attention; back to the residual.
    2. Norm, then the MLP, with or without a gate; back to the residual.

    On the way every hook point of `PASSED` that has hooks is called.
    """
    batch, seq, _ = residual.shape
    passing = partial(_pass_hook_point, packed.heard, (batch, seq))
    at = passing if packed.heard else (lambda name, x: x)
    # views in place of einops, whose look-up counts here: this runs per block and decoded token
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


def _pass_hook_point(
    heard: Mapping[str, HookPoint], shape: tuple[int, int], name: str, x: Float[Tensor, "n ..."]
) -> Float[Tensor, "n ..."]:
    """What goes on from a hook point: what its hooks make of `[batch seq ...]`, or x as it is."""
    point = heard.get(name)
    return x if point is None else point(x.unflatten(0, shape)).flatten(0, 1)


def _mlp(
    packed: PackedBlock, x: Float[Tensor, "n d_model"], at: Callable[[str, Tensor], Tensor]
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
    attention_mask: Bool[Tensor, "batch seq"] | None = None,
    dtype: torch.dtype | None = None,
    recompute: bool = False,
    padded: bool | None = None,
    units: Mapping[nn.Module, nn.Module] = NO_UNITS,
) -> Float[Tensor, "batch seq d_model"]:
    """The residual stream after the last block; arguments are those of `final_residuals`.

    Only the hook points of `PASSED` are passed, and that of the embedding.

    Args:
        recompute: keep only the residuals between blocks for the backward pass; everything within
            a block, its packed matrices included, is made there again.
        units: see `Forward`.

    Raises:
        ConfigError: `recompute`, and a hook within a block, which would fire twice.
    """
    if recompute:
        refuse_hooked_blocks(model)

    def run(tokens: Tensor) -> tuple[Tensor]:
        make_room_for(model, tokens.shape[1])
        residual = embed(model, tokens, slice(0, tokens.shape[1]))
        for block in model.blocks:
            run_one = partial(_pack_and_run, block, dtype or model.cfg.dtype)
            run_one = partial(run_again, run_one) if recompute else run_one
            unit = units.get(block)
            residual = run_one(residual) if unit is None else unit(run_one, residual)
        return (residual,)

    return run_left_padded(run, tokens, attention_mask, padded)[0]


def _pack_and_run(
    block: nn.Module, dtype: torch.dtype, residual: Float[Tensor, "batch seq d_model"]
) -> Float[Tensor, "batch seq d_model"]:
    packed = _pack_block(block, dtype)
    return run_block(packed, residual, partial(attend_causally, packed.attend))
