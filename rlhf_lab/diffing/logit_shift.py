"""Shift of a logit difference between two models, by component and by cause."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.diffing.contrast import Words, make_contrast
from rlhf_lab.models.device import exact, where_exact
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.models.residual_parts import PART_SITES, residual_components
from rlhf_lab.training.capture import ROWS_AT_ONCE, capture_activations

BLOCK_INPUTS = "blocks.*.hook_resid_?[ir]?"  # pre and mid, which attentions and MLPs read


class ModelEnd(NamedTuple):
    """One of two models at one position, on the same text."""

    parts: Float[Tensor, "component batch d_model"]  # outputs to the residual stream, in float64
    fed: Float[Tensor, "component batch d_model"]  # outputs if blocks read the other's streams
    inverse_scale: Float[Tensor, " batch"]  # one over the final norm's scale
    reader: Float[Tensor, " d_model"]  # gain times the contrast's columns of the unembedding
    constants: Float[Tensor, "2"]  # of the final norm's bias and of b_U, along the contrast


class ShiftCauses(NamedTuple):
    """Causes of a shift, by component; the four of them sum to it."""

    own_weights: Float[Tensor, "component batch"]  # changes of the component's own weights
    inherited: Float[Tensor, "component batch"]  # changes of the earlier components that it reads
    scale: Float[Tensor, "component batch"]  # the final norm's scale
    read_out: Float[Tensor, "component batch"]  # unembedding, and the final norm's gain and bias


def split_shift(before: ModelEnd, after: ModelEnd, centered: bool) -> ShiftCauses:
    """Split what each component adds to the shift of a logit difference exactly by its causes.

    1. A component adds <k, q> s: its output (minus its mean if the norm is a LayerNorm), the
       reader, and one over the scale. Three factors change at once, so each gets its Shapley value,
       which is also the integral along the straight line between the two models. No factor goes
       first.
    2. What the output itself gets depends on the component's weights and on what it reads: the
       Shapley value of these two, from the outputs of each model's component on the other's
       streams, along `own_reader`.
    3. The constants, norm bias and b_U, belong to the unembedding; they are the last two rows,
       which the other causes have as 0.

    Args:
        centered: whether the final norm subtracts the mean.

    With X_ij = <k_i, q_j>, 0 before and 1 after:
    own      = (X10 - X00)(s0/3 + s1/6) + (X11 - X01)(s1/3 + s0/6)
    read_out = (X01 - X00)(s0/3 + s1/6) + (X11 - X10)(s1/3 + s0/6)
    scale    = (s1 - s0)(X00/3 + X11/3 + (X01 + X10)/6)
    With c_ij what the weights of i make of the streams of j (c_10 is `after.fed`), w = own_reader:
    own_weights = <(c_10 - c_00) + (c_11 - c_01), w> / 2
    inherited   = <(c_01 - c_00) + (c_11 - c_10), w> / 2;  own = own_weights + inherited
    (Shapley 1953; the integral: Owen 1972, "Multilinear Extensions of Games")
    """
    k = [_less_mean(end.parts) if centered else end.parts for end in (before, after)]
    s0, s1 = before.inverse_scale, after.inverse_scale
    early, late = s0 / 3 + s1 / 6, s1 / 3 + s0 / 6
    x = [[k_i @ end.reader for end in (before, after)] for k_i in k]
    read_out = (x[0][1] - x[0][0]) * early + (x[1][1] - x[1][0]) * late
    scale = (s1 - s0) * ((x[0][0] + x[1][1]) / 3 + (x[0][1] + x[1][0]) / 6)
    # outputs by whose weights and whose streams: 00, 10 (the tuned weights on the base's), 01, 11
    by_weights = (after.fed - before.parts) + (after.parts - before.fed)
    by_input = (before.fed - before.parts) + (after.parts - after.fed)
    reader = own_reader((s0, s1), (before.reader, after.reader), centered)
    along = lambda moved: torch.einsum("cbm,bm->cb", moved / 2, reader)
    nothing = read_out.new_zeros(2, read_out.shape[1])
    constants = (after.constants - before.constants)[:, None].expand_as(nothing)
    return ShiftCauses(
        torch.cat([along(by_weights), nothing]),
        torch.cat([along(by_input), nothing]),
        torch.cat([scale, nothing]),
        torch.cat([read_out, constants]),
    )


def own_reader(
    inverse_scales: Sequence[Float[Tensor, " batch"]],
    readers: Sequence[Float[Tensor, " d_model"]],
    centered: bool,
) -> Float[Tensor, "batch d_model"]:
    """Return the vector along which a change of a component's output is its part of the shift.

    w = q0 (s0/3 + s1/6) + q1 (s1/3 + s0/6), minus its mean if the norm is centered; see `ModelEnd`.
    """
    s0, s1 = (scale[:, None] for scale in inverse_scales)
    reader = readers[0] * (s0 / 3 + s1 / 6) + readers[1] * (s1 / 3 + s0 / 6)
    return _less_mean(reader) if centered else reader


def logit_reader(model: HookedModel, words: Words) -> Float[Tensor, " d_model"]:
    """Return the final norm's gain times the contrast's columns of the unembedding, in float64."""
    u = make_contrast(model, words).of(model.unembed.W_U)
    return exact(model.ln_final.w) * u if hasattr(model.ln_final, "w") else u


@torch.no_grad()
def ends_of(
    models: tuple[HookedModel, HookedModel],
    acts: tuple[dict[str, Tensor], dict[str, Tensor]],
    tokens: Int[Tensor, "batch seq"],
    pos: int | Int[Tensor, " batch"],
    words: Words,
) -> tuple[ModelEnd, ModelEnd]:
    """Return both models at one position, each also with its blocks reading the other's streams.

    All blocks are fed at once, so the output of one block does not reach a later one.

    Args:
        acts: of both, at `residual_parts.SITES` and that position: `[batch ...]`.
        tokens: padded on the right, if at all.
        pos: the column, or one for each row.
    """
    streams = [capture_activations(model, tokens, BLOCK_INPUTS) for model in models]
    pos, found = torch.as_tensor(pos).expand(len(tokens)), []
    for model, own, others in zip(models, acts, reversed(streams), strict=True):
        parts = []
        for rows in torch.arange(len(tokens)).split(ROWS_AT_ONCE):
            give = lambda act, hook, rows=rows, fed=others: fed[hook.name][rows].to(act)
            with model.hooks(fwd_hooks=[(site, give) for site in others]):
                at = pos.to(rows.device)[rows]
                parts.append(capture_activations(model, tokens[rows], PART_SITES, at))
        fed = {site: torch.cat([part[site] for part in parts]) for site in parts[0]}
        norm, contrast = model.ln_final, make_contrast(model, words)
        u = contrast.of(model.unembed.W_U)
        bias = exact(norm.b) @ u if hasattr(norm, "b") else torch.zeros_like(u[0])
        constants = torch.stack([bias, contrast.of(model.unembed.b_U)])
        scale, reader = exact(own["ln_final.hook_scale"])[:, 0], logit_reader(model, contrast)
        both = (
            residual_components(model, {site: where_exact(act) for site, act in each.items()})[1]
            for each in (own, fed)
        )
        found.append(ModelEnd(*both, 1 / scale, reader, constants))
    return found[0], found[1]


def _less_mean(x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
    return x - x.mean(-1, keepdim=True)
