"""Padding: position ids, and rows moved to left or right padding."""

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from rlhf_lab.functional.masks import check_mask

__all__ = ["pad_left", "pad_right", "position_ids"]


def position_ids(mask: Bool[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
    """Number the real tokens of each row from 0, wherever its padding stands.

    1. Count the real tokens up to and including each one, and subtract 1.
    2. Give padding position 0: it exists in every model, and nothing attends to it.

    Raises ValueError if the mask is not boolean.
    """
    check_mask(mask, mask)
    return (mask.long().cumsum(dim=-1) - 1).masked_fill(~mask, 0)


def pad_left(
    x: Shaped[Tensor, "batch seq *rest"],
    mask: Bool[Tensor, "batch seq"],
    fill: int | float | bool = 0,
    length: int | None = None,
) -> tuple[Shaped[Tensor, "batch length *rest"], Bool[Tensor, "batch length"]]:
    """Move the real entries of each row to its right end, so that generation can go on from there.

    1. Make rows of `length` entries (as many as before, if None), full of `fill`.
    2. Put the real entries of each row at its right end, in their order.

    Returns the new rows and their mask. For tokens, `fill` is the pad token; anything else with one
    entry per token (log-probabilities, values) can be moved in the same way. Raises ValueError if a
    row has more than `length` real entries, or if the mask has another shape than the rows.
    """
    length = mask.shape[1] if length is None else length
    return _place(x, mask, fill, length, start=length - mask.sum(dim=-1))


def pad_right(
    x: Shaped[Tensor, "batch seq *rest"],
    mask: Bool[Tensor, "batch seq"],
    fill: int | float | bool = 0,
    length: int | None = None,
) -> tuple[Shaped[Tensor, "batch length *rest"], Bool[Tensor, "batch length"]]:
    """Move the real entries of each row to its left end, where a causal model never sees padding.

    Steps, what is returned and what is refused are those of `pad_left`, at the other end.
    """
    length = mask.shape[1] if length is None else length
    return _place(x, mask, fill, length, start=torch.zeros_like(mask.sum(dim=-1)))


def _place(
    x: Tensor, mask: Tensor, fill: int | float | bool, length: int, start: Tensor
) -> tuple[Tensor, Tensor]:
    """Copy the real entries of each row into a new row, one after the other from `start` on."""
    check_mask(x, mask)
    longest = int(mask.sum(dim=-1).max()) if len(mask) else 0
    if longest > length:
        raise ValueError(
            f"length is {length} but a row has {longest} real entries; give a length of at least "
            f"{longest}, or truncate first."
        )
    slots = (mask.nonzero()[:, 0], (position_ids(mask) + start[:, None])[mask])
    moved = x.new_full((len(x), length, *x.shape[2:]), fill).index_put(slots, x[mask])
    moved_mask = mask.new_zeros(len(x), length).index_put(slots, mask[mask])
    return moved, moved_mask
