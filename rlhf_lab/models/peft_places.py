"""Places of LoRA adapters: PEFT's two matrices for a module, and ours for the weights in it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import einops
import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.errors import LoadError
from rlhf_lab.models.lora import LoRALinear
from rlhf_lab.models.transformer_lens import Place

OURS = ("W_Q", "W_K", "W_V", "W_O", "W_in", "W_out", "W_gate")


class Factors(NamedTuple):
    """A change of a weight: scale times the product of two matrices, inputs and outputs flat."""

    A: Float[Tensor, "d_in rank"]
    B: Float[Tensor, "rank d_out"]
    scale: float


def has_adapters(place: Place) -> bool:
    """Whether a tensor of transformers holds matrices of ours that adapters can hang on."""
    return all(piece.ours.rsplit(".", 1)[-1].lstrip("_") in OURS for piece in place.pieces)


def flat_factors(adapter: LoRALinear) -> Factors:
    """The factors of an adapter of ours."""
    A, B = adapter.A.detach(), adapter.B.detach()
    if A.ndim == 3:
        A = einops.rearrange(A, "head d_head rank -> (head d_head) rank")
    if B.ndim == 3:
        B = einops.rearrange(B, "head rank d_head -> rank (head d_head)")
    return Factors(A, B, adapter.alpha / adapter.rank)


def fill_adapter(adapter: LoRALinear, factors: Factors) -> None:
    """Give an adapter of ours these factors, in place."""
    A, B = factors.A, factors.B
    if adapter.A.ndim == 3:
        A = einops.rearrange(A, "(head d) rank -> head d rank", head=len(adapter.A))
    if adapter.B.ndim == 3:
        B = einops.rearrange(B, "rank (head d) -> head rank d", head=len(adapter.B))
    adapter.A.data.copy_(A)
    adapter.B.data.copy_(B)


def fused_factors(place: Place, factors: Mapping[str, Factors]) -> Factors:
    """The factors of a module of transformers, of those of the weights in it.

    1. Put the A of all weights side by side, and their B into blocks of a matrix of zeros.
    2. Weigh the B of those with another scale than the first.
    3. Bring the outputs into the order of transformers.
    """
    held = [(piece, factors[piece.ours]) for piece in place.pieces if piece.ours in factors]
    if len(place.pieces) == 1:
        return held[0][1]
    scale = held[0][1].scale
    width = sum(piece.share for piece in place.pieces)
    blocks, at = [], 0
    for piece in place.pieces:
        if piece.ours in factors:
            found = factors[piece.ours]
            block = found.B.new_zeros(len(found.B), width)
            block[:, at : at + piece.share] = found.B * (found.scale / scale)
            blocks.append(block)
        at += piece.share
    B = torch.cat(blocks).T
    if place.order:
        left, right = place.order.split(" -> ")
        B = einops.rearrange(B, f"{right} -> {left}", **place.axes)
    return Factors(torch.cat([found.A for _, found in held], 1), B.T, scale)


def split_factors(place: Place, factors: Factors) -> dict[str, Factors]:
    """The factors of the weights in a module of transformers; the inverse of `fused_factors`.

    Where each component changes the outputs of one weight only, that one alone has it, and a weight
    without any has no adapter. Otherwise all have the same A, and learn apart from here on.

    Raises:
        LoadError: the matrices have other sizes than the module.
    """
    if len(place.pieces) == 1:
        return {place.pieces[0].ours: factors}
    B = factors.B.T
    shares = [piece.share for piece in place.pieces]
    if len(B) != sum(shares):
        raise LoadError(f"has {len(B)} outputs, and {place.theirs} has {sum(shares)}.")
    if place.order:
        B = einops.rearrange(B, place.order, **place.axes)
    parts = [part.T for part in B.split(shares)]
    acts: Float[Tensor, "piece rank"] = torch.stack([part.any(1) for part in parts])
    apart = bool((acts.sum(0) == 1).all())
    found = {}
    for piece, part, acting in zip(place.pieces, parts, acts, strict=True):
        if not apart:
            found[piece.ours] = Factors(factors.A, part, factors.scale)
        elif acting.any():
            found[piece.ours] = Factors(factors.A[:, acting], part[acting], factors.scale)
    return found


def theirs_of(places: Sequence[Place], adapters: Mapping[str, LoRALinear]) -> dict[str, Factors]:
    """The factors by module of transformers, of a model's adapters by weight.

    Raises:
        LoadError: an adapter on a weight that is in no module.
    """
    ours = {name: flat_factors(adapter) for name, adapter in adapters.items()}
    found = {
        place.theirs.removesuffix(".weight"): fused_factors(place, ours)
        for place in places
        if has_adapters(place) and any(piece.ours in ours for piece in place.pieces)
    }
    placed = {piece.ours for place in places for piece in place.pieces}
    lost = sorted(ours.keys() - placed)
    if lost:
        raise LoadError(f"the adapter on {lost[0]} has no place in a model of transformers.")
    return found
