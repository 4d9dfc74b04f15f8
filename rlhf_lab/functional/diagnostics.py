"""Diagnostics of drift: clip fraction, ratio, chi-square, effective samples, promoted mass."""

from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.functional.masks import at_least_float32, check_same_shape, masked_mean, zero_masked
from rlhf_lab.functional.policy_loss import policy_ratio

__all__ = [
    "chi_square",
    "clip_fraction",
    "clip_fraction_high",
    "clip_fraction_low",
    "effective_sample_size",
    "mean_ratio",
    "promoted_mass",
    "value_clip_fraction",
]


def clip_fraction(
    logprobs: Float[Tensor, "batch gen"],
    old_logprobs: Float[Tensor, "batch gen"],
    clip_coef: float,
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, ""]:
    """Give the share of real tokens whose ratio lies outside 1 - clip_coef .. 1 + clip_coef.

    Raises ValueError if the mask has another shape than `[batch gen]`.
    """
    ratio = policy_ratio(logprobs, old_logprobs)
    outside = (ratio - 1).abs() > clip_coef
    return masked_mean(outside.to(ratio.dtype), mask)


def clip_fraction_low(
    logprobs: Float[Tensor, "batch gen"],
    old_logprobs: Float[Tensor, "batch gen"],
    clip_coef: float,
    mask: Bool[Tensor, "batch gen"] | None = None,
    advantages: Float[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, ""]:
    """Give the share of real tokens whose ratio lies below 1 - clip_coef.

    1. Find the tokens that became that much less likely.
    2. With `advantages`, keep those whose advantage is negative: only they lose their gradient.
    3. Average over the real tokens.

    Raises ValueError if the mask has another shape.
    """
    ratio = policy_ratio(logprobs, old_logprobs)
    outside = ratio < 1 - clip_coef
    check_same_shape(logprobs=logprobs, advantages=advantages)
    if advantages is not None:
        outside = outside & (advantages < 0)
    return masked_mean(outside.to(ratio.dtype), mask)


def clip_fraction_high(
    logprobs: Float[Tensor, "batch gen"],
    old_logprobs: Float[Tensor, "batch gen"],
    clip_coef: float,
    mask: Bool[Tensor, "batch gen"] | None = None,
    advantages: Float[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, ""]:
    """Give the share of real tokens whose ratio lies above 1 + clip_coef.

    1. Find the tokens that became that much likelier.
    2. With `advantages`, keep those whose advantage is positive: only they lose their gradient.
    3. Average over the real tokens.

    With clip-higher, `clip_coef` is `clip_coef_high`. Raises ValueError if the mask has another
    shape.
    """
    ratio = policy_ratio(logprobs, old_logprobs)
    outside = ratio > 1 + clip_coef
    check_same_shape(logprobs=logprobs, advantages=advantages)
    if advantages is not None:
        outside = outside & (advantages > 0)
    return masked_mean(outside.to(ratio.dtype), mask)


def value_clip_fraction(
    values: Float[Tensor, "batch gen"],
    returns: Float[Tensor, "batch gen"],
    old_values: Float[Tensor, "batch gen"],
    clip: float,
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, ""]:
    """Give the share of real tokens at which value clipping stops the value head's gradient.

    1. Find the values that moved further than `clip` from the old one.
    2. Of these, keep the ones whose error is larger when they are held within `clip`: there the
       held value is what counts.
    3. Average over the real tokens.

    Raises ValueError if `clip` is negative or the mask has another shape.
    """
    if clip < 0:
        raise ValueError(f"clip is {clip}; give a number of at least 0.")
    check_same_shape(values=values, returns=returns, old_values=old_values)
    values, returns, old_values = map(at_least_float32, (values, returns, old_values))
    moved = values - old_values
    held = old_values + moved.clamp(-clip, clip)
    stopped = (moved.abs() > clip) & ((held - returns).abs() > (values - returns).abs())
    return masked_mean(stopped.to(values.dtype), mask)


def mean_ratio(
    logprobs: Float[Tensor, "batch gen"],
    old_logprobs: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, ""]:
    """Average the ratio over the real tokens: near 1, as its expectation is exactly 1.

    Raises ValueError if the mask has another shape.
    """
    return masked_mean(policy_ratio(logprobs, old_logprobs), mask)


def chi_square(
    logprobs: Float[Tensor, "batch gen"],
    old_logprobs: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, ""]:
    """Estimate the chi-square divergence of the policy from the one that sampled.

    About twice the KL while both are small. Raises ValueError if the mask has another shape.

    chi^2(pi || pi_old) = E_old[(r - 1)^2]
    """
    return masked_mean((policy_ratio(logprobs, old_logprobs) - 1).square(), mask)


def effective_sample_size(
    logprobs: Float[Tensor, "batch gen"],
    old_logprobs: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, ""]:
    """Say how many tokens of equal weight the minibatch is worth, once weighed by their ratios.

    1. Keep the log-ratios of the real tokens.
    2. Measure them from the largest, which changes nothing but keeps the exponentials in range.
    3. Divide the square of the sum of the ratios by the sum of their squares.

    In tokens: all of them when every ratio is the same, 1 when one outweighs the rest, 0.0 when
    there are none. Raises ValueError if the mask has another shape.

    ESS = (sum w)^2 / sum w^2   (Kong 1992)
    """
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
    logprobs, old_logprobs = zero_masked(logprobs, mask), zero_masked(old_logprobs, mask)
    log_ratio = at_least_float32(logprobs) - at_least_float32(old_logprobs)
    if mask is not None:
        log_ratio = log_ratio[mask]
    if not log_ratio.numel():
        return log_ratio.sum()
    weights = (log_ratio - log_ratio.max().detach()).exp()
    return weights.sum().square() / weights.square().sum()


def promoted_mass(
    logits: Float[Tensor, "batch gen d_vocab"],
    ref_logits: Float[Tensor, "batch gen d_vocab"],
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, " d_vocab"]:
    """Give the probability that each token of the vocabulary has won from the reference, per state.

    1. Turn both models' logits in the same states into probabilities.
    2. Subtract the reference's.
    3. Average over the states of real tokens. A mean over none is 0.

    It sums to 0: what some tokens win, others lose. Raises ValueError if the shapes differ.

    D(v) = mean_s [pi(v | s) - ref(v | s)]
    """
    check_same_shape(logits=logits, ref_logits=ref_logits)
    check_same_shape(logits.shape[:-1], mask=mask)
    won = at_least_float32(zero_masked(logits, mask)).softmax(-1)
    won = won - at_least_float32(zero_masked(ref_logits, mask)).softmax(-1)
    states = won.shape[0] * won.shape[1] if mask is None else int(mask.sum())
    return zero_masked(won, mask).sum((0, 1)) / max(1, states)
