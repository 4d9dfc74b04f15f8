"""LoRA adapters as rank-1 pieces of the change that they make, with what each reads and writes."""

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
        reads: unit vectors on the side of the inputs, heads side by side.
        writes: unit vectors on the side of the outputs.
    """

    s: Float[Tensor, " piece"]
    reads: Float[Tensor, "piece rows"]
    writes: Float[Tensor, "piece cols"]

    def piece(self, index: int) -> Float[Tensor, "rows cols"]:
        """One of them as a matrix."""
        return self.s[index] * torch.outer(self.reads[index], self.writes[index])

    def summed(self) -> Float[Tensor, "rows cols"]:
        """The change itself."""
        return (self.reads.T * self.s) @ self.writes


class PieceEnd(NamedTuple):
    """Where one end of a piece is, and its direction in the residual stream, if it has one.

    Args:
        name: "residual", "values of L0H1", "queries of L0H1", "keys of L0H1", or "neuron 17".
    """

    name: str
    direction: Float[Tensor, " d_model"] | None


@torch.no_grad()
def adapter_pieces(adapter: LoRALinear) -> AdapterPieces:
    """The singular value decomposition of the change that an adapter makes, in float64.

    1. Make both factors orthonormal: A = Q_A R_A and B' = Q_B R_B.
    2. Decompose the small matrix between them, (alpha / rank) R_A R_B'.
    3. Give each pair of vectors the sign by which the largest entry written is positive.

    The columns of A and the rows of B themselves are no parts of the adapter: B R and R^-1 A are
    the same adapter for every invertible R. The change, and so its pieces, are the same.
    """
    A, B, scale = flat_factors(adapter)
    (q_a, r_a), (q_b, r_b) = (torch.linalg.qr(exact(x)) for x in (A, B.T))
    u, s, vh = torch.linalg.svd(scale * r_a @ r_b.T, full_matrices=False)
    reads, writes = (q_a @ u).T, vh @ q_b.T
    sign = writes.gather(1, writes.abs().argmax(1, keepdim=True)).sign()
    return AdapterPieces(s, reads * sign, writes * sign)


def reading_side(model: HookedModel, weight: str, read: Float[Tensor, " rows"]) -> PieceEnd:
    """What a piece of a weight reads, as a direction of the residual stream in front of the norm.

    W_Q, W_K, W_V, W_in and W_gate read the normalized residual: the norm's gain is multiplied in.
    W_O reads what heads carry, of which the strongest is taken back through its W_V. W_out reads
    neurons, behind a nonlinearity: the strongest is named, and there is no direction.
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
    """What a piece of a weight writes, as a direction of the residual stream.

    W_O and W_out write there themselves. Of what W_V writes, the strongest head's part is carried
    on by that head's W_O. Queries, keys and neurons are named, and have no direction.
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
    carried = torch.stack(
        [by_head[head] @ exact(attn.W_O[head * shared + i]) for i in range(shared)]
    )
    best = int(carried.norm(dim=1).argmax())
    return PieceEnd(f"values of L{layer}H{head * shared + best}", carried[best])


def words_read(
    model: HookedModel, direction: Float[Tensor, " d_model"]
) -> Float[Tensor, " d_vocab"]:
    """Cosine of a reading direction with each token's embedding, less the mean embedding."""
    return _cosines(exact(model.embed.W_E), direction)


def words_written(
    model: HookedModel, direction: Float[Tensor, " d_model"]
) -> Float[Tensor, " d_vocab"]:
    """Cosine of a written direction with what raises each token's logit above the mean logit.

    The final norm's gain is multiplied in; its scale changes no cosine.
    """
    return _cosines(exact(model.unembed.W_U).T, _before_norm(model.ln_final, direction))


def upstream_writers(
    model: HookedModel, weight: str, direction: Float[Tensor, " d_model"]
) -> dict[str, float]:
    """How much of what each earlier part writes lies along a direction: 1 is chance.

    ||W d||^2 / ||W||^2 d_model, for the embeddings, and each earlier head's W_O and MLP's W_out;
    for an MLP's weight also the heads of its own layer, unless the two run in parallel.
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
    """A weight's layer, and its kind, such as W_Q."""
    layer, kind = PLACE.fullmatch(weight).groups()
    return int(layer), kind


def _before_norm(
    norm: nn.Module, direction: Float[Tensor, " d_model"]
) -> Float[Tensor, " d_model"]:
    """A direction as it is read in front of a norm, whose scale is left aside."""
    read = direction * exact(norm.w) if hasattr(norm, "w") else direction
    return read - read.mean() if is_centered(norm) else read


def _cosines(
    table: Float[Tensor, "d_vocab d_model"], direction: Float[Tensor, " d_model"]
) -> Float[Tensor, " d_vocab"]:
    apart = table - table.mean(0)
    size = apart.norm(dim=1) * direction.norm()
    return apart @ direction / size.clamp(min=1e-30)
