"""Masks over generated tokens, and masked sums, means, variances and whitening."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = [
    "at_least_float32",
    "finished_mask",
    "has_stop",
    "last_token_mask",
    "masked_mean",
    "masked_std",
    "masked_var",
    "response_mask",
    "sequence_sum",
    "truncate_at_stop",
    "whiten",
    "zero_masked",
]

Denominator = int | float | Tensor | None
Dims = int | tuple[int, ...] | None


def at_least_float32(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return x in float32 if it comes in half precision, and unchanged otherwise.

    Sums over tokens and softmaxes over the vocabulary lose digits or overflow in float16 and
    bfloat16, so every function here that reduces starts with this step.
    """
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def check_mask(x: Tensor, mask: Tensor | None) -> None:
    """Refuse a mask that is not boolean or does not cover the leading axes of x.

    Raises ValueError naming the dtype or the shapes.
    """
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}; give a boolean mask (mask.bool()).")
    if mask.shape != x.shape[: mask.ndim]:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)} but the tensor it masks has shape "
            f"{tuple(x.shape)}; give one mask entry per token."
        )


def check_same_shape(shape: Sequence[int] | None = None, /, **tensors: Tensor | None) -> None:
    """Refuse tensors of unequal shapes, which torch would broadcast to a wrong number in silence.

    1. Leave out those that are None.
    2. Compare each shape with `shape`, or with that of the first one if that is None.

    Looks at shapes alone, so that no device has to be waited for. Raises ValueError naming both
    shapes.
    """
    first = None
    for name, x in tensors.items():
        if x is None:
            continue
        if shape is None:
            shape, first = x.shape, name
        elif x.shape != torch.Size(shape):
            other = "the batch asks for" if first is None else f"{first} has"
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} where {other} {tuple(shape)}; give both the "
                "same shape, or one would be broadcast over the other."
            )


def zero_masked(x: Float[Tensor, "..."], mask: Bool[Tensor, "..."] | None) -> Float[Tensor, "..."]:
    """Replace x by 0 wherever the mask is False, in value and in gradient.

    1. Check that the mask covers the leading axes of x (`[batch gen]` of `[batch gen d_vocab]`).
    2. Give the mask the missing trailing axes.
    3. Fill the masked entries with 0, so that a nan or inf in them cannot reach anything.

    Apply it to the inputs of exp, log and division, not to their outputs: 0 * inf is nan in the
    backward pass. Raises ValueError if the shapes disagree.
    """
    check_mask(x, mask)
    if mask is None:
        return x
    mask = mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
    return x.masked_fill(~mask, 0.0)


def masked_mean(
    x: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    dim: Dims = None,
    denominator: Denominator = None,
) -> Float[Tensor, "..."]:
    """Average x over the entries where the mask is True.

    1. Put 0 where the mask is False.
    2. Sum over `dim` (over everything if `dim` is None).
    3. Divide by the number of real entries, or by `denominator` if one is given.

    With `denominator` = the number of real tokens of the whole minibatch, the results of its
    micro-batches add up to the result of the minibatch. Where this count is 0, or the given
    denominator is, divide by 1: a mean over nothing is 0.0 with gradient 0. Half-precision input
    gives a float32 result. Raises ValueError if the mask has another shape than x, or if the
    denominator is negative.

    mean = sum_i m_i x_i / sum_i m_i
    """
    x = at_least_float32(x)
    total = zero_masked(x, mask).sum(dim=dim)
    if denominator is None:
        denominator = _real(x, mask).sum(dim=dim)
    elif not isinstance(denominator, Tensor) and denominator < 0:
        raise ValueError(f"denominator is {denominator}; give a number of tokens, or None.")
    count = torch.as_tensor(denominator, dtype=x.dtype, device=x.device)
    return total / count.masked_fill(count == 0, 1.0)


def masked_var(
    x: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    dim: Dims = None,
    unbiased: bool = True,
) -> Float[Tensor, "..."]:
    """Take the variance of x over the entries where the mask is True.

    1. Take the masked mean over `dim` (over everything if `dim` is None).
    2. Square the distance of every real entry from it, and put 0 elsewhere.
    3. Sum, and divide by n - 1 (or by n if not `unbiased`), with n the number of real entries.

    One real entry, or none, has variance 0.0 (not nan). Half-precision input gives a float32
    result. Raises ValueError if the mask has another shape than x.

    var = sum_i m_i (x_i - mean)^2 / (sum_i m_i - 1)
    """
    x, real = zero_masked(at_least_float32(x), mask), _real(x, mask)
    dim = tuple(range(x.ndim)) if dim is None else dim
    count = real.sum(dim=dim, keepdim=True)
    mean = x.sum(dim=dim, keepdim=True) / count.clamp(min=1)
    squares = zero_masked(x - mean, real).square().sum(dim=dim)
    return squares / (count.reshape(squares.shape) - int(unbiased)).clamp(min=1)


def masked_std(
    x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"] | None = None, dim: Dims = None
) -> Float[Tensor, "..."]:
    """Take the unbiased standard deviation of x over the entries where the mask is True.

    1. Take the masked variance.
    2. Take its root where it is positive, and 0 where it is 0.

    The second step keeps the gradient finite, since the root has an infinite slope at 0.
    """
    var = masked_var(x, mask, dim)
    return torch.where(var > 0, var, 1.0).sqrt() * (var > 0)


def whiten(
    x: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    shift_mean: bool = True,
    eps: float = 1e-8,
) -> Float[Tensor, "*shape"]:
    """Scale x to variance 1 over its real entries, and move their mean to 0 if asked.

    1. Subtract the masked mean.
    2. Divide by the root of the masked variance plus `eps` (inside the root).
    3. Where all real entries are equal, put 0: what rounding leaves of them is no difference.
    4. If `shift_mean` is False, add the mean back: only the scale changes.
    5. Put 0 where the mask is False.

    One real entry becomes 0.0. Raises ValueError if the mask has another shape than x.

    w_i = (x_i - mean) / sqrt(var + eps)   (`whiten` in the code of Ziegler et al. 2019)
    """
    x, unreal = zero_masked(at_least_float32(x), mask), ~_real(x, mask)
    if not x.numel():
        return x
    mean = masked_mean(x, mask)
    whitened = (x - mean) * torch.rsqrt(masked_var(x, mask) + eps)
    lowest = x.masked_fill(unreal, torch.inf).min()
    highest = x.masked_fill(unreal, -torch.inf).max()
    whitened = whitened.masked_fill(lowest == highest, 0.0)
    if not shift_mean:
        whitened = whitened + mean
    return zero_masked(whitened, mask)


def response_mask(
    tokens: Int[Tensor, "batch gen"], stop_tokens: Sequence[int]
) -> Bool[Tensor, "batch gen"]:
    """Mark the tokens of each response, up to and including its first stop token.

    1. Find the stop tokens.
    2. Count, for each token, how many stop tokens stand before it.
    3. Keep the tokens that have none before them.

    A response without a stop token is real to its end.
    """
    stops = torch.tensor(list(stop_tokens), dtype=tokens.dtype, device=tokens.device)
    is_stop = torch.isin(tokens, stops).long()
    return is_stop.cumsum(dim=-1) - is_stop == 0


def truncate_at_stop(
    tokens: Int[Tensor, "batch gen"], stop_tokens: Sequence[int], pad_token: int
) -> Int[Tensor, "batch gen"]:
    """Replace everything after the first stop token by the pad token, in a new tensor.

    1. Mark the real tokens (the stop token is one of them).
    2. Fill the others with `pad_token`.
    """
    return tokens.masked_fill(~response_mask(tokens, stop_tokens), pad_token)


def has_stop(
    tokens: Int[Tensor, "batch gen"],
    stop_tokens: Sequence[int],
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Bool[Tensor, " batch"]:
    """Say of each response whether it came to an end by itself, in its last slot included.

    1. Find the stop tokens.
    2. Leave out those that the mask does not count as real (padding may be the stop token).
    3. Ask of each row whether one is left.

    Raises ValueError if the mask has another shape than `[batch gen]`.
    """
    stops = torch.tensor(list(stop_tokens), dtype=tokens.dtype, device=tokens.device)
    return (torch.isin(tokens, stops) & _real(tokens, mask)).any(dim=-1)


def finished_mask(
    mask: Bool[Tensor, "batch gen"], finished: Bool[Tensor, " batch"]
) -> Bool[Tensor, "batch gen"]:
    """Leave responses that were cut off out of the objective, since their reward says little.

    1. Keep the mask of the responses that finished (see `has_stop`).
    2. Mask every token of the others.

    Raises ValueError if the mask is not boolean.

    Source: Yu et al. 2025, DAPO, arXiv 2503.14476, section 3.4 (overlong filtering)
    """
    check_mask(mask, mask)
    check_same_shape(mask.shape[:1], finished=finished)
    return mask & finished[:, None]


def last_token_mask(mask: Bool[Tensor, "batch gen"]) -> Bool[Tensor, "batch gen"]:
    """Mark the last real token of each row, and nothing in a row that has none.

    1. Count, for each token, the real tokens from it to the end of the row.
    2. Keep the real token that counts only itself.

    Raises ValueError if the mask is not boolean.
    """
    check_mask(mask, mask)
    from_here_on = mask.long().flip(-1).cumsum(dim=-1).flip(-1)
    return mask & (from_here_on == 1)


def sequence_sum(
    x: Float[Tensor, "batch gen"], mask: Bool[Tensor, "batch gen"] | None = None
) -> Float[Tensor, " batch"]:
    """Sum x over the real tokens of each sequence.

    1. Put 0 where the mask is False.
    2. Sum over the generated tokens.

    A row without a real token sums to 0.0. Raises ValueError if the mask has another shape than x.
    """
    check_same_shape(x=x, mask=mask)
    return zero_masked(at_least_float32(x), mask).sum(dim=-1)


def _real(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mask of x, all True if there is none; ValueError for another shape or dtype."""
    if mask is None:
        return torch.ones_like(x, dtype=torch.bool)
    if mask.shape != x.shape:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)} but must have the shape {tuple(x.shape)} of the "
            "values it masks."
        )
    check_mask(x, mask)
    return mask
