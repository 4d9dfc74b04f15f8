"""Rank-1 pieces of LoRA adapters, and the words and components that each reads and writes."""

import re
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rlhf_lab.models import LoRALinear
from rlhf_lab.models.device import exact
from rlhf_lab.models.hooked_model import HookedModel, is_centered
from rlhf_lab.models.peft_format import flat_factors

PLACE = re.compile(r"blocks\.(\d+)\.(?:attn|mlp)\._?(W_\w+)")


class AdapterPieces(NamedTuple):
    """Rank-1 pieces of a change of a weight, strongest first: s_i read_i' write_i.

    Args:
        reads: unit vectors of the inputs, heads side by side.
        writes: unit vectors of the outputs.
    """

    s: Float[Tensor, " piece"]
    reads: Float[Tensor, "piece rows"]
    writes: Float[Tensor, "piece cols"]

    def piece(self, index: int) -> Float[Tensor, "rows cols"]:
        """Return one piece as a matrix."""
        return self.s[index] * torch.outer(self.reads[index], self.writes[index])

    def summed(self) -> Float[Tensor, "rows cols"]:
        """Return the whole change."""
        return (self.reads.T * self.s) @ self.writes


class PieceEnd(NamedTuple):
    """An end of a piece: its name, such as "values of L0H1", and residual direction, if any."""

    name: str
    direction: Float[Tensor, " d_model"] | None


@torch.no_grad()
def adapter_pieces(adapter: LoRALinear) -> AdapterPieces:
    """Decompose the change of an adapter by singular values, in float64.

    1. Factor A = Q_A R_A and B' = Q_B R_B, and decompose (alpha / rank) R_A R_B'.
    2. Choose signs such that the largest entry of each written vector is positive.

    Columns of A and rows of B are not unique (B R and R^-1 A are the same adapter); pieces are.
    """
    A, B, scale = flat_factors(adapter)
    (q_a, r_a), (q_b, r_b) = (torch.linalg.qr(exact(x)) for x in (A, B.T))
    u, s, vh = torch.linalg.svd(scale * r_a @ r_b.T, full_matrices=False)
    reads, writes = (q_a @ u).T, vh @ q_b.T
    sign = writes.gather(1, writes.abs().argmax(1, keepdim=True)).sign()
    return AdapterPieces(s, reads * sign, writes * sign)


def reading_side(model: HookedModel, weight: str, read: Float[Tensor, " rows"]) -> PieceEnd:
    """Return the input of a piece, as a direction of the residual stream before the norm.

    For W_O it is the strongest head, through its W_V; for W_out the strongest neuron.
    """
    layer, kind = _place(weight)
    block = model.blocks[layer]
    if kind == "W_out":
        return PieceEnd(f"neuron {int(read.abs().argmax())}", None)
    if kind == "W_O":
        by_head = read.reshape(model.cfg.n_heads, -1)
        head = int(by_head.norm(dim=1).argmax())
        through = exact(block.attn.W_V[head]) @ by_head[head]
        return PieceEnd(f"values of L{layer}H{head}", _before_norm(block.ln1, through))
    norm = block.ln2 if kind in ("W_in", "W_gate") else block.ln1
    return PieceEnd("residual", _before_norm(norm, read))


def writing_side(model: HookedModel, weight: str, write: Float[Tensor, " cols"]) -> PieceEnd:
    """Return the output of a piece, as a direction of the residual stream.

    For W_V it is the strongest head, through its W_O; queries, keys and neurons have no direction.
    """
    layer, kind = _place(weight)
    attn = model.blocks[layer].attn
    if kind in ("W_O", "W_out"):
        return PieceEnd("residual", write)
    if kind in ("W_in", "W_gate"):
        return PieceEnd(f"neuron {int(write.abs().argmax())}", None)
    by_head = write.reshape(-1, model.cfg.d_head)
    head = int(by_head.norm(dim=1).argmax())
    shared = model.cfg.n_heads // len(by_head)
    if kind != "W_V":
        what = {"W_Q": "queries", "W_K": "keys"}[kind]
        return PieceEnd(f"{what} of L{layer}H{head * shared}", None)
    outputs = exact(attn.W_O[head * shared : (head + 1) * shared])
    carried = by_head[head] @ outputs
    best = int(carried.norm(dim=1).argmax())
    return PieceEnd(f"values of L{layer}H{head * shared + best}", carried[best])


def words_read(
    model: HookedModel, direction: Float[Tensor, " d_model"]
) -> Float[Tensor, " d_vocab"]:
    """Return cosines of a direction with each token's embedding minus the mean embedding."""
    return _cosines(exact(model.embed.W_E), direction)


def words_written(
    model: HookedModel, direction: Float[Tensor, " d_model"]
) -> Float[Tensor, " d_vocab"]:
    """Return cosines of a direction with each token's unembedding, through the final norm."""
    return _cosines(exact(model.unembed.W_U).T, _before_norm(model.ln_final, direction))


def upstream_writers(
    model: HookedModel, weight: str, direction: Float[Tensor, " d_model"]
) -> dict[str, float]:
    """Return how much of each earlier component's output is along a direction; 1 if random.

    ||W d||^2 / ||W||^2 d_model, for embeddings, and each earlier head's W_O and MLP's W_out; for an
    MLP's weight also heads of the same layer, unless both run in parallel.
    """
    layer, kind = _place(weight)
    in_mlp = kind in ("W_in", "W_gate") and not model.cfg.parallel_attn_mlp
    writers = {"embed": exact(model.embed.W_E)}
    if hasattr(model, "pos_embed"):
        writers["pos_embed"] = exact(model.pos_embed.W_pos)
    for at in range(layer + in_mlp):
        block = model.blocks[at]
        writers |= {f"L{at}H{head}": exact(W) for head, W in enumerate(block.attn.W_O)}
        if at < layer:
            writers[f"L{at} mlp"] = exact(block.mlp.W_out)
    unit = direction / direction.norm()
    return {
        name: ((W @ unit).square().sum() / W.square().sum() * len(unit)).item()
        for name, W in writers.items()
    }


def _place(weight: str) -> tuple[int, str]:
    layer, kind = PLACE.fullmatch(weight).groups()
    return int(layer), kind


def _before_norm(
    norm: nn.Module, direction: Float[Tensor, " d_model"]
) -> Float[Tensor, " d_model"]:
    read = direction * exact(norm.w) if hasattr(norm, "w") else direction
    return read - read.mean() if is_centered(norm) else read


def _cosines(
    table: Float[Tensor, "d_vocab d_model"], direction: Float[Tensor, " d_model"]
) -> Float[Tensor, " d_vocab"]:
    apart = table - table.mean(0)
    size = apart.norm(dim=1) * direction.norm()
    return apart @ direction / size.clamp(min=1e-30)
