"""Rank-1 pieces of LoRA adapters, and what each reads and writes."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rlhf_lab.diffing.steering import Vector
from rlhf_lab.diffing.weights import as_matrix, from_matrix
from rlhf_lab.models import LoRALinear
from rlhf_lab.models.device import exact
from rlhf_lab.models.hooked_model import HookedModel, is_centered
from rlhf_lab.models.peft_format import flat_factors

PieceSide = tuple[str, Vector | None]  # such as "values of L0H1", and its residual direction


class AdapterPieces(NamedTuple):
    """Rank-1 pieces of a change of a weight, strongest first: s_i read_i' write_i.

    Args:
        reads: unit vectors of the inputs, heads side by side.
        writes: unit vectors of the outputs.
    """

    s: Float[Tensor, " piece"]
    reads: Float[Tensor, "piece rows"]
    writes: Float[Tensor, "piece cols"]


def without_piece(
    name: str, weight: Float[Tensor, "*shape"], pieces: AdapterPieces, index: int
) -> Float[Tensor, "*shape"]:
    """Return a weight without one piece of its adapter."""
    piece = pieces.s[index] * torch.outer(pieces.reads[index], pieces.writes[index])
    return from_matrix(name, exact(as_matrix(name, weight)) - piece, weight).to(weight)


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


def reading_side(model: HookedModel, weight: str, read: Float[Tensor, " rows"]) -> PieceSide:
    """Return the input of a piece, as a direction of the residual stream before the norm.

    For W_O it is the strongest head, through its W_V; for W_out the strongest neuron.
    """
    _, layer, _, kind = weight.replace("._", ".").split(".")  # blocks.0.attn._W_K
    block = model.blocks[int(layer)]
    if kind == "W_out":
        return f"neuron {int(read.abs().argmax())}", None
    if kind == "W_O":
        by_head = read.reshape(model.cfg.n_heads, -1)
        head = int(by_head.norm(dim=1).argmax())
        through = exact(block.attn.W_V[head]) @ by_head[head]
        return f"values of L{layer}H{head}", before_norm(block.ln1, through)
    norm = block.ln2 if kind in ("W_in", "W_gate") else block.ln1
    return "residual", before_norm(norm, read)


def writing_side(model: HookedModel, weight: str, write: Float[Tensor, " cols"]) -> PieceSide:
    """Return the output of a piece, as a direction of the residual stream.

    For W_V it is the strongest head, through its W_O; queries, keys and neurons have no direction.
    """
    _, layer, _, kind = weight.replace("._", ".").split(".")  # blocks.0.attn._W_K
    attn = model.blocks[int(layer)].attn
    if kind in ("W_O", "W_out"):
        return "residual", write
    if kind in ("W_in", "W_gate"):
        return f"neuron {int(write.abs().argmax())}", None
    by_head = write.reshape(-1, model.cfg.d_head)
    head = int(by_head.norm(dim=1).argmax())
    shared = model.cfg.n_heads // len(by_head)
    if kind != "W_V":
        what = {"W_Q": "queries", "W_K": "keys"}[kind]
        return f"{what} of L{layer}H{head * shared}", None
    outputs = exact(attn.W_O[head * shared : (head + 1) * shared])
    carried = by_head[head] @ outputs
    best = int(carried.norm(dim=1).argmax())
    return f"values of L{layer}H{head * shared + best}", carried[best]


def upstream_writers(model: HookedModel, weight: str, direction: Vector) -> dict[str, float]:
    """Return how much of each earlier component's output is along a direction; 1 if random.

    ||W d||^2 / ||W||^2 d_model, for embeddings, and each earlier head's W_O and MLP's W_out; for an
    MLP's weight also heads of the same layer, unless both run in parallel.
    """
    _, layer, _, kind = weight.replace("._", ".").split(".")
    in_mlp = kind in ("W_in", "W_gate") and not model.cfg.parallel_attn_mlp
    writers = {"embed": exact(model.embed.W_E)}
    if hasattr(model, "pos_embed"):
        writers["pos_embed"] = exact(model.pos_embed.W_pos)
    for at in range(int(layer) + in_mlp):
        block = model.blocks[at]
        writers |= {f"L{at}H{head}": exact(W) for head, W in enumerate(block.attn.W_O)}
        if at < int(layer):
            writers[f"L{at} mlp"] = exact(block.mlp.W_out)
    unit = direction / direction.norm()
    return {
        name: ((W @ unit).square().sum() / W.square().sum() * len(unit)).item()
        for name, W in writers.items()
    }


def before_norm(norm: nn.Module, direction: Vector) -> Vector:
    """Return the direction before a norm that the norm's output has along `direction`."""
    read = direction * exact(norm.w) if hasattr(norm, "w") else direction
    return read - read.mean() if is_centered(norm) else read
