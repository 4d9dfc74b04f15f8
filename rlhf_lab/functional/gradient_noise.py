"""Gradient noise: how well gradients of small batches agree with the one they estimate."""

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.functional.masks import at_least_float32, check_same_shape

__all__ = ["gradient_cosine", "kept_share", "noise_scale"]


def gradient_cosine(
    gradients: Float[Tensor, "batch parameters"],
    reference: Float[Tensor, " parameters"],
    n: int,
) -> Float[Tensor, " groups"]:
    """Give the cosine of the mean gradient of each batch of n with a reference gradient.

    1. Cut the rows, each the gradient of a sequence or of a block of sequences, into batches of n
       in their order; leave out the rows at the end that fill no batch.
    2. Average the n gradients of each batch, without subtracting any mean.
    3. Take the cosine of each average with the reference.

    Raises ValueError unless n lies between 1 and the number of rows.

    cos_k = <g_k, g> / (|g_k| |g|), with g_k the mean of rows k n to k n + n - 1
    """
    check_same_shape(gradients.shape[1:], reference=reference)
    if not 1 <= n <= len(gradients):
        raise ValueError(f"n is {n} for {len(gradients)} gradients; give 1 to {len(gradients)}.")
    whole = gradients[: len(gradients) // n * n]
    means = at_least_float32(whole).unflatten(0, (-1, n)).mean(dim=1)
    return torch.cosine_similarity(means, at_least_float32(reference)[None], dim=-1)


def noise_scale(gradients: Float[Tensor, "batch parameters"], n: int = 1) -> Float[Tensor, ""]:
    """Give the batch size, in sequences, at which a gradient is as much noise as signal.

    1. Each row is the mean gradient of n sequences: n times the rows' variance, summed over the
       parameters, is the variance of one sequence's gradient.
    2. Estimate the squared length of the true gradient by the product of the means of the even and
       of the odd rows, whose noise is independent.
    3. Divide.

    A batch of b sequences has a cosine of about 1 / sqrt(1 + scale / b) with the true gradient if
    its gradient is right on average. Below 0, or large without bound, where the rows are too few to
    tell the gradient from its noise. Raises ValueError for fewer than 4 rows, or an n below 1.

    B = tr(Cov g_i) / |E g_i|^2   (McCandlish et al. 2018, arXiv 1812.06162, equation 2.8)
    """
    if len(gradients) < 4:
        raise ValueError(f"gradients has {len(gradients)} rows; give at least 4.")
    if n < 1:
        raise ValueError(f"n is {n}; give how many sequences each row is the mean of, at least 1.")
    gradients = at_least_float32(gradients)
    even, odd = gradients[0::2].mean(dim=0), gradients[1::2].mean(dim=0)
    return n * gradients.var(dim=0).sum() / (even @ odd)


def kept_share(
    gradients: Float[Tensor, "batch parameters"], reference: Float[Tensor, " parameters"]
) -> Float[Tensor, " batch"]:
    """Give how much of a reference gradient each gradient holds: 1 all of it, 0 nothing.

    The mean over many gradients is 1 if they are right on average, whatever their noise.

    share_i = <g_i, g> / <g, g>
    """
    check_same_shape(gradients.shape[1:], reference=reference)
    reference = at_least_float32(reference)
    return at_least_float32(gradients) @ reference / (reference @ reference)
