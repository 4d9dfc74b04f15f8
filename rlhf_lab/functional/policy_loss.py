"""The clipped surrogate objective of PPO, and what tells how often it clips."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.functional.masks import (
    Denominator,
    at_least_float32,
    masked_mean,
    whiten,
    zero_masked,
)

MAX_LOG_RATIO = 20.0


def policy_ratio(
    logprobs: Float[Tensor, "batch gen"], old_logprobs: Float[Tensor, "batch gen"]
) -> Float[Tensor, "batch gen"]:
    """Say how many times likelier each sampled token is now than when it was sampled.

    1. Subtract the old log-probability from the new one.
    2. Limit the difference to 20: a ratio of 5e8 is far outside any clip range, and float32
       would overflow at 88, which puts nan into gradients that clipping should have made 0.
    3. Take the exponential.

    Half-precision input gives a float32 result.

    r_t = pi(a_t | s_t) / pi_old(a_t | s_t)   (Schulman et al. 2017, section 3)
    """
    log_ratio = at_least_float32(logprobs) - at_least_float32(old_logprobs)
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def clip_fraction(
    logprobs: Float[Tensor, "batch gen"],
    old_logprobs: Float[Tensor, "batch gen"],
    clip_coef: float,
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, ""]:
    """Give the share of real tokens whose ratio lies outside 1 - clip_coef .. 1 + clip_coef.

    1. Take the ratio of every token.
    2. Average "further from 1 than clip_coef" over the real tokens.

    Raises ValueError if the mask has another shape than `[batch gen]`.
    """
    ratio = policy_ratio(logprobs, old_logprobs)
    outside = (ratio - 1).abs() > clip_coef
    return masked_mean(outside.to(ratio.dtype), mask)


def calc_clipped_surrogate_objective(
    logprobs: Float[Tensor, "batch gen"],
    old_logprobs: Float[Tensor, "batch gen"],
    advantages: Float[Tensor, "batch gen"],
    clip_coef: float,
    mask: Bool[Tensor, "batch gen"] | None = None,
    normalize: bool = True,
    denominator: Denominator = None,
    eps: float = 1e-8,
) -> Float[Tensor, ""]:
    """Compute PPO's clipped surrogate objective, which is to be maximised.

    1. Blank the log-probabilities at masked tokens.
    2. If `normalize`, whiten the advantages over the real tokens.
    3. Take the ratio of new to old probability, and a copy of it clipped to within clip_coef of 1.
    4. Multiply both by the advantage, and take the smaller product at each token.
    5. Average over the real tokens.

    `denominator` as in `masked_mean`; micro-batches of one minibatch need advantages that were
    whitened together beforehand, and `normalize=False`. A single token whitens to advantage 0.0.
    Raises ValueError if clip_coef is negative or the mask has another shape.

    L = mean_t min(r_t A_t, clip(r_t, 1 - clip_coef, 1 + clip_coef) A_t)
    (Schulman et al. 2017, PPO, arXiv 1707.06347, equation 7)
    """
    if clip_coef < 0:
        raise ValueError(f"clip_coef is {clip_coef}; give a number of at least 0, such as 0.2.")
    ratio = policy_ratio(zero_masked(logprobs, mask), zero_masked(old_logprobs, mask))
    if normalize:
        advantages = whiten(advantages, mask, eps=eps)
    clipped_ratio = ratio.clip(1 - clip_coef, 1 + clip_coef)
    surrogate = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    return masked_mean(surrogate, mask, denominator=denominator)
