"""Diagnostics: clip fractions, importance weights, effective samples, promoted mass, noise."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.functional.masks import at_least_float32, check_same_shape, real_entries, zero_masked
from rlhf_lab.functional.moments import masked_mean
from rlhf_lab.functional.policy_loss import policy_ratio


def clip_fraction(
    logprobs: Float[Tensor, "batch gen"],
    old_logprobs: Float[Tensor, "batch gen"],
    clip_coef: float,
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, ""]:
    """Compute the fraction of real tokens with a ratio outside 1 - clip_coef .. 1 + clip_coef."""
    ratio = policy_ratio(logprobs, old_logprobs)
    return masked_mean(((ratio - 1).abs() > clip_coef).to(ratio.dtype), mask)


def clip_fraction_low(
    logprobs: Float[Tensor, "batch gen"],
    old_logprobs: Float[Tensor, "batch gen"],
    clip_coef: float,
    mask: Bool[Tensor, "batch gen"] | None = None,
    advantages: Float[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, ""]:
    """Compute the fraction of real tokens with a ratio below 1 - clip_coef (and advantage < 0)."""
    check_same_shape(logprobs=logprobs, advantages=advantages)
    ratio = policy_ratio(logprobs, old_logprobs)
    outside = (ratio < 1 - clip_coef) & (True if advantages is None else advantages < 0)
    return masked_mean(outside.to(ratio.dtype), mask)


def clip_fraction_high(
    logprobs: Float[Tensor, "batch gen"],
    old_logprobs: Float[Tensor, "batch gen"],
    clip_coef: float,
    mask: Bool[Tensor, "batch gen"] | None = None,
    advantages: Float[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, ""]:
    """Compute the fraction of real tokens with a ratio above 1 + clip_coef (and advantage > 0)."""
    ratio = policy_ratio(logprobs, old_logprobs)
    check_same_shape(logprobs=logprobs, advantages=advantages)
    outside = (ratio > 1 + clip_coef) & (True if advantages is None else advantages > 0)
    return masked_mean(outside.to(ratio.dtype), mask)


def value_clip_fraction(
    values: Float[Tensor, "batch gen"],
    returns: Float[Tensor, "batch gen"],
    old_values: Float[Tensor, "batch gen"],
    clip: float,
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, ""]:
    """Compute the fraction of real tokens at which value clipping stops the gradient."""
    check_same_shape(values=values, returns=returns, old_values=old_values)
    values, returns, old_values = map(at_least_float32, (values, returns, old_values))
    moved = values - old_values
    clipped = old_values + moved.clamp(-clip, clip)
    stopped = (moved.abs() > clip) & ((clipped - returns).abs() > (values - returns).abs())
    return masked_mean(stopped.to(values.dtype), mask)


def mean_ratio(
    logprobs: Float[Tensor, "batch gen"],
    old_logprobs: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, ""]:
    """Average the ratio over the real tokens: near 1, since its expectation is exactly 1."""
    return masked_mean(policy_ratio(logprobs, old_logprobs), mask)


def chi_square(
    logprobs: Float[Tensor, "batch gen"],
    old_logprobs: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, ""]:
    """Estimate the chi-square divergence from the policy that sampled; about 2 KL if small.

    chi^2(pi || pi_old) = E_old[(r - 1)^2]
    """
    return masked_mean((policy_ratio(logprobs, old_logprobs) - 1).square(), mask)


def effective_sample_size(
    logprobs: Float[Tensor, "batch gen"],
    old_logprobs: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, ""]:
    """Compute the number of equally weighted tokens that the minibatch is worth; 0.0 without one.

    ESS = (sum w)^2 / sum w^2   (Kong 1992)
    """
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
    log_ratio = at_least_float32(logprobs) - at_least_float32(old_logprobs)
    log_ratio = log_ratio[real_entries(log_ratio, mask)]
    if not log_ratio.numel():
        return log_ratio.sum()
    weights = (log_ratio - log_ratio.max().detach()).exp()
    return weights.sum().square() / weights.square().sum()


def truncated_importance_weights(
    logprobs: Float[Tensor, "batch gen"],
    sampler_logprobs: Float[Tensor, "batch gen"],
    cap: float,
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, "batch gen"]:
    """Compute the ratio of scorer to sampler probability per token, at most `cap`, no gradient.

    min(pi / pi_sampler, cap)   (Espeholt et al. 2018, IMPALA, arXiv 1802.01561)
    """
    if not cap > 0:
        raise ValueError(f"cap must be greater than 0, got {cap}.")
    check_same_shape(logprobs=logprobs, sampler_logprobs=sampler_logprobs, mask=mask)
    weights = policy_ratio(logprobs, sampler_logprobs).detach().clamp(max=cap)
    return zero_masked(weights, mask)


def masked_importance_weights(
    logprobs: Float[Tensor, "batch gen"],
    sampler_logprobs: Float[Tensor, "batch gen"],
    cap: float,
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, "batch gen"]:
    """Weight tokens as `truncated_importance_weights`, with 0 instead of the cap above it.

    rho 1[rho <= cap],  rho = pi / pi_sampler   (token_mask in TRL)
    """
    weights = truncated_importance_weights(logprobs, sampler_logprobs, cap, mask)
    return weights.masked_fill(policy_ratio(logprobs, sampler_logprobs) > cap, 0.0)


def promoted_mass(
    logits: Float[Tensor, "batch gen d_vocab"],
    ref_logits: Float[Tensor, "batch gen d_vocab"],
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, " d_vocab"]:
    """Compute each token's mean gain in probability over the reference, per state.

    1. Turn both models' logits in the same states into probabilities.
    2. Subtract the reference's.
    3. Average over the states of real tokens. A mean over none is 0.

    It sums to 0: gains of some tokens are losses of others.

    D(v) = mean_s [pi(v | s) - ref(v | s)]
    """
    check_same_shape(logits=logits, ref_logits=ref_logits)
    check_same_shape(logits.shape[:-1], mask=mask)
    won = at_least_float32(zero_masked(logits, mask)).softmax(-1)
    won = won - at_least_float32(zero_masked(ref_logits, mask)).softmax(-1)
    states = won.shape[0] * won.shape[1] if mask is None else int(mask.sum())
    return zero_masked(won, mask).sum((0, 1)) / max(1, states)


def gradient_cosine(
    gradients: Float[Tensor, "batch parameters"],
    reference: Float[Tensor, " parameters"],
    n: int,
) -> Float[Tensor, " groups"]:
    """Compute the cosine of the mean gradient of each batch of n with a reference gradient.

    1. Cut the rows, each the gradient of a sequence or of a block of sequences, into batches of n
       in their order, without the rows at the end that fill no batch.
    2. Average the n gradients of each batch, without subtracting any mean.
    3. Take the cosine of each average with the reference.

    Raises ValueError unless n is between 1 and the number of rows.

    cos_k = <g_k, g> / (|g_k| |g|), with g_k the mean of rows k n to k n + n - 1
    """
    check_same_shape(gradients.shape[1:], reference=reference)
    if not 1 <= n <= len(gradients):
        raise ValueError(f"n must be between 1 and {len(gradients)} (the gradients), got {n}.")
    whole = gradients[: len(gradients) // n * n]
    means = at_least_float32(whole).unflatten(0, (-1, n)).mean(dim=1)
    return torch.cosine_similarity(means, at_least_float32(reference)[None], dim=-1)


def kept_share(
    gradients: Float[Tensor, "batch parameters"], reference: Float[Tensor, " parameters"]
) -> Float[Tensor, " batch"]:
    """Compute the projection of each gradient on a reference, as a fraction of the reference.

    share_i = <g_i, g> / <g, g>
    """
    check_same_shape(gradients.shape[1:], reference=reference)
    reference = at_least_float32(reference)
    return at_least_float32(gradients) @ reference / (reference @ reference)
