"""Aggregation of per-token losses: token mean, sequence mean, or a constant denominator."""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.functional.masks import (
    Denominator,
    at_least_float32,
    check_mask,
    check_same_shape,
    masked_mean,
    sequence_sum,
)

__all__ = ["aggregate", "aggregation_denominator"]

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def aggregate(
    x: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"] | None = None,
    aggregation: Aggregation = "token_mean",
    denominator: Denominator = None,
) -> Float[Tensor, ""]:
    """Average a quantity that every generated token has, in one of three ways.

    1. "token_mean": sum over the real tokens; every token counts the same (DAPO).
    2. "sequence_mean": sum of each sequence's mean; every sequence counts the same, so that the
       tokens of long responses count less (GRPO).
    3. "constant": sum over the real tokens, to be divided by a number that does not depend on
       their lengths (Dr. GRPO).
    4. Divide by `aggregation_denominator(mask, aggregation)`, or by `denominator` if one is given.

    With `denominator` = the sum of `aggregation_denominator` over all micro-batches (or ranks),
    their results add up to the result of the whole minibatch, however it was cut. Nothing real
    gives 0.0 with gradient 0. Raises ValueError for another name, a mask of another shape, or a
    negative denominator.

    Source: Yu et al. 2025, DAPO, arXiv 2503.14476, section 3.3; Liu et al. 2025, Dr. GRPO,
    arXiv 2503.20783
    """
    mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
    if denominator is None:
        denominator = aggregation_denominator(mask, aggregation)
    check_mask(x, mask)
    check_same_shape(x=x, mask=mask)
    if aggregation == "sequence_mean":
        per_sequence = masked_mean(x, mask, dim=-1)
    elif aggregation in ("token_mean", "constant"):
        per_sequence = sequence_sum(at_least_float32(x), mask)
    else:
        raise _unknown(aggregation)
    return masked_mean(per_sequence, denominator=denominator)


def aggregation_denominator(
    mask: Bool[Tensor, "batch gen"],
    aggregation: Aggregation = "token_mean",
    max_len: int | None = None,
) -> Float[Tensor, ""]:
    """Count what `aggregate` divides by; counts of micro-batches and ranks add up to the whole's.

    1. "token_mean": the number of real tokens.
    2. "sequence_mean": the number of sequences that have a real token.
    3. "constant": the number of sequences times `max_len` (the mask's own length, if None; give it
       where micro-batches have different ones).

    Raises ValueError for another name, if max_len is below 1, or if the mask is not boolean.
    """
    check_mask(mask, mask)
    if max_len is not None and max_len < 1:
        raise ValueError(
            f"max_len is {max_len}; give the number of tokens of the longest response."
        )
    if aggregation == "token_mean":
        return mask.sum().float()
    if aggregation == "sequence_mean":
        return mask.any(dim=-1).sum().float()
    if aggregation == "constant":
        max_len = mask.shape[1] if max_len is None else max_len
        return torch.full((), float(len(mask) * max_len), device=mask.device)
    raise _unknown(aggregation)


def _unknown(aggregation: str) -> ValueError:
    """The refusal of a name that is none of the three."""
    return ValueError(
        f"aggregation is {aggregation!r}; give 'token_mean', 'sequence_mean' or 'constant'."
    )
