"""Masks over generated tokens: shape checks, stop tokens, padding and position ids."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor


def at_least_float32(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Convert half precision to float32, in which sums and softmaxes neither overflow nor round."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def check_mask(x: Tensor, mask: Tensor | None) -> None:
    """Raise ValueError unless the mask is boolean and covers the leading axes of x."""
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}. Pass a boolean mask (mask.bool()).")
    check_same_shape(x.shape[: mask.ndim], mask=mask)


def check_same_shape(shape: Sequence[int] | None = None, /, **tensors: Tensor | None) -> None:
    """Raise ValueError if tensors differ in shape; torch would broadcast some of them silently.

    Compares with `shape`, or with the first tensor if `shape` is None. None is skipped.
    """
    first = None
    for name, x in tensors.items():
        if x is None:
            continue
        if shape is None:
            shape, first = x.shape, name
        elif x.shape != torch.Size(shape):
            match = f" to match {first}" if first else ""
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, expected {tuple(shape)}{match}. "
                "Pass tensors of the same shape, which are never broadcast here."
            )


def zero_masked(x: Float[Tensor, "..."], mask: Bool[Tensor, "..."] | None) -> Float[Tensor, "..."]:
    """Replace x by 0 wherever the mask is False, in value and in gradient.

    A mask `[batch gen]` also covers an x `[batch gen d_vocab]`. Apply it to the inputs of exp, log
    and division, not to their outputs: 0 * inf is nan in the backward pass.
    """
    check_mask(x, mask)
    if mask is None:
        return x
    mask = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
    return x.masked_fill(~mask, 0.0)


def real_entries(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mask of x, or all True for None; raise ValueError for another shape or dtype."""
    if mask is None:
        return torch.ones_like(x, dtype=torch.bool)
    check_same_shape(x.shape, mask=mask)
    check_mask(x, mask)
    return mask


def _is_stop(tokens: Tensor, stop_tokens: Sequence[int]) -> Tensor:
    if isinstance(stop_tokens, int | str | None) or getattr(stop_tokens, "ndim", 1) != 1:
        raise ValueError(f"stop_tokens={stop_tokens!r} must be a list of token ids, such as [2].")
    stops = torch.tensor(list(stop_tokens), dtype=tokens.dtype)
    return torch.isin(tokens, stops.to(tokens.device, non_blocking=tokens.is_cuda))


def response_mask(
    tokens: Int[Tensor, "batch gen"], stop_tokens: Sequence[int]
) -> Bool[Tensor, "batch gen"]:
    """Mark the tokens of each response, up to and including its first stop token, if any."""
    is_stop = _is_stop(tokens, stop_tokens).long()
    return is_stop.cumsum(dim=-1) - is_stop == 0


def truncate_at_stop(
    tokens: Int[Tensor, "batch gen"], stop_tokens: Sequence[int], pad_token: int
) -> Int[Tensor, "batch gen"]:
    """Replace everything after the first stop token by the pad token, in a new tensor."""
    return tokens.masked_fill(~response_mask(tokens, stop_tokens), pad_token)


def has_stop(
    tokens: Int[Tensor, "batch gen"],
    stop_tokens: Sequence[int],
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Bool[Tensor, " batch"]:
    """Mark the responses with a stop token under the mask; padding may be the stop token."""
    return (_is_stop(tokens, stop_tokens) & real_entries(tokens, mask)).any(dim=-1)


def finished_mask(
    mask: Bool[Tensor, "batch gen"], finished: Bool[Tensor, " batch"]
) -> Bool[Tensor, "batch gen"]:
    """Mask every token of the responses that were cut off before a stop token (see `has_stop`).

    Source: Yu et al. 2025, DAPO, arXiv 2503.14476, section 3.4 (overlong filtering)
    """
    check_mask(mask, mask)
    check_same_shape(mask.shape[:1], finished=finished)
    return mask & finished[:, None]


def last_token_mask(mask: Bool[Tensor, "batch gen"]) -> Bool[Tensor, "batch gen"]:
    """Mark the last real token of each row; a row without a real token stays False."""
    check_mask(mask, mask)
    from_here_on = mask.long().flip(-1).cumsum(dim=-1).flip(-1)
    return mask & (from_here_on == 1)


def position_ids(mask: Bool[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
    """Number the real tokens of each row from 0; padding has position 0, valid in any model."""
    check_mask(mask, mask)
    return (mask.long().cumsum(dim=-1) - 1).masked_fill(~mask, 0)


def pad_left(
    x: Shaped[Tensor, "batch seq *rest"],
    mask: Bool[Tensor, "batch seq"],
    fill: int | float | bool = 0,
    length: int | None = None,
) -> tuple[Shaped[Tensor, "batch length *rest"], Bool[Tensor, "batch length"]]:
    """Move the real entries of each row to its right end, where generation continues.

    Returns rows of `length` entries (unchanged if None), filled with `fill`, and their mask. Raises
    ValueError if a row has more than `length` real entries.
    """
    length = mask.shape[1] if length is None else length
    return _place(x, mask, fill, length, start=length - mask.sum(dim=-1))


def pad_right(
    x: Shaped[Tensor, "batch seq *rest"],
    mask: Bool[Tensor, "batch seq"],
    fill: int | float | bool = 0,
    length: int | None = None,
) -> tuple[Shaped[Tensor, "batch length *rest"], Bool[Tensor, "batch length"]]:
    """Move the real entries of each row to its left end; otherwise the same as `pad_left`."""
    length = mask.shape[1] if length is None else length
    return _place(x, mask, fill, length, start=torch.zeros_like(mask.sum(dim=-1)))


def _place(
    x: Tensor, mask: Tensor, fill: int | float | bool, length: int, start: Tensor
) -> tuple[Tensor, Tensor]:
    check_mask(x, mask)
    longest = int(mask.sum(dim=-1).max()) if len(mask) else 0
    if longest > length:
        raise ValueError(f"length={length} is below the {longest} real entries of a row. Raise it.")
    slots = (mask.nonzero()[:, 0], (position_ids(mask) + start[:, None])[mask])
    moved = x.new_full((len(x), length, *x.shape[2:]), fill).index_put(slots, x[mask])
    moved_mask = mask.new_zeros(len(x), length).index_put(slots, mask[mask])
    return moved, moved_mask
