"""Attention drift between two models: outputs of heads by pattern, values and W_O."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class HeadCache(NamedTuple):
    """Patterns of one query of each row, and values of every key, in one layer."""

    pattern: Float[Tensor, "batch head key"]
    value: Float[Tensor, "batch key value_head d_head"]


class AttentionSplit(NamedTuple):
    """Change of heads' outputs along a reader by key, and by pattern, values and W_O."""

    qk: Float[Tensor, "batch head key"]
    ov: Float[Tensor, "batch head key"]
    wo: Float[Tensor, "batch head key"]


def attention_split(
    cache0: HeadCache,
    cache1: HeadCache,
    W_O0: Float[Tensor, "head d_head d_model"],
    W_O1: Float[Tensor, "head d_head d_model"],
    reader: Float[Tensor, "batch d_model"],
) -> AttentionSplit:
    """Split the change of each head's output along a reader, key by key, by its three factors.

    1. The output is y = sum_k A[k] <V[k] W_O, w>: pattern, value and W_O, each linear. Each factor
       gets its Shapley value, which is the integral along the straight line between the models.
    2. Rows of A sum to 1, so a change of the pattern is measured against the mean value of the
       keys: the sum is the same, and a constant (such as b_V) does not count.

    With v_ij[k] = <V_i[k] W_Oj, w>, D for a difference, and means over both models:
    vbar  = (v00 + v11)/3 + (v01 + v10)/6
    qk[k] = DA[k] (vbar[k] - sum_j Abar[j] vbar[j])
    ov[k] = (v10 - v00)(A0/3 + A1/6) + (v11 - v01)(A1/3 + A0/6)
    wo[k] = (v01 - v00)(A0/3 + A1/6) + (v11 - v10)(A1/3 + A0/6)
    (Shapley 1953; the integral: Owen 1972, "Multilinear Extensions of Games")
    """
    readers = [torch.einsum("hdm,bm->bhd", W_O, reader) for W_O in (W_O0, W_O1)]
    values = [  # by query head, if several heads share a value
        cache.value.repeat_interleave(cache.pattern.shape[1] // cache.value.shape[2], dim=2)
        for cache in (cache0, cache1)
    ]
    v = [[torch.einsum("bkhd,bhd->bhk", value, read) for read in readers] for value in values]
    early = cache0.pattern / 3 + cache1.pattern / 6
    late = cache1.pattern / 3 + cache0.pattern / 6
    moved, between = cache1.pattern - cache0.pattern, (cache0.pattern + cache1.pattern) / 2
    mean = (v[0][0] + v[1][1]) / 3 + (v[0][1] + v[1][0]) / 6
    return AttentionSplit(
        moved * (mean - (between * mean).sum(-1, keepdim=True)),
        (v[1][0] - v[0][0]) * early + (v[1][1] - v[0][1]) * late,
        (v[0][1] - v[0][0]) * early + (v[1][1] - v[1][0]) * late,
    )


def pattern_distance(
    pattern0: Float[Tensor, "*batch key"], pattern1: Float[Tensor, "*batch key"]
) -> Float[Tensor, "*batch key"]:
    """Return half the absolute difference at every key; its sum is the total variation."""
    return (pattern1 - pattern0).abs() / 2
