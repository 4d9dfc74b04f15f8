"""Policy losses: PPO's clipped surrogate, GSPO, CISPO and the plain policy gradient; maximised."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.functional.masks import (
    Denominator,
    at_least_float32,
    check_same_shape,
    masked_mean,
    whiten,
    zero_masked,
)

__all__ = [
    "calc_clipped_surrogate_objective",
    "cispo_surrogate",
    "gspo_surrogate",
    "masked_importance_weights",
    "policy_gradient_objective",
    "policy_gradient_surrogate",
    "policy_ratio",
    "ppo_surrogate",
    "sequence_ratio",
    "truncated_importance_weights",
]

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
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs)
    log_ratio = at_least_float32(logprobs) - at_least_float32(old_logprobs)
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def sequence_ratio(
    logprobs: Float[Tensor, "batch gen"],
    old_logprobs: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, " batch"]:
    """Say how many times likelier each response is now, per token: a geometric mean of ratios.

    1. Average the log-ratios over the real tokens of each sequence.
    2. Limit the mean to 20, as `policy_ratio` does, and take the exponential.

    A sequence without a real token has ratio 1. Raises ValueError if the mask has another shape.

    s_i = (pi(y_i | x) / pi_old(y_i | x))^(1 / |y_i|)   (Zheng et al. 2025, GSPO, arXiv 2507.18071,
    section 4.1)
    """
    return _mean_log_ratio(logprobs, old_logprobs, mask).clamp(max=MAX_LOG_RATIO).exp()


def ppo_surrogate(
    logprobs: Float[Tensor, "batch gen"],
    old_logprobs: Float[Tensor, "batch gen"],
    advantages: Float[Tensor, "batch gen"],
    clip_coef: float,
    clip_coef_high: float | None = None,
    dual_clip: float | None = None,
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, "batch gen"]:
    """Give each token the smaller of its ratio and its clipped ratio times its advantage: PPO.

    1. Blank the inputs at masked tokens.
    2. Take the ratio of new to old probability, and a copy of it that is held between
       1 - clip_coef and 1 + clip_coef_high (clip_coef again, if None).
    3. Multiply both by the advantage, and take the smaller product.
    4. With `dual_clip`, do not let a token of negative advantage fall below dual_clip times it:
       a ratio that ran away would otherwise drown the rest of the minibatch.

    Raises ValueError if a clip is negative, if dual_clip is not above 1, or if the mask has another
    shape.

    min(r A, clip(r, 1 - e_low, 1 + e_high) A)   (Schulman et al. 2017, arXiv 1707.06347, equation
    7; two clips, "clip-higher": Yu et al. 2025, DAPO, arXiv 2503.14476, section 3.1), and with dual
    clip max(that, c A) where A < 0   (Ye et al. 2020, arXiv 1912.09729)
    """
    low, high = _clip_range(clip_coef, clip_coef_high)
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    logprobs, old_logprobs, advantages = _blank(mask, logprobs, old_logprobs, advantages)
    ratio = policy_ratio(logprobs, old_logprobs)
    surrogate = torch.minimum(ratio * advantages, ratio.clip(low, high) * advantages)
    if dual_clip is None:
        return surrogate
    if not dual_clip > 1:
        raise ValueError(f"dual_clip is {dual_clip}; give a number above 1, such as 3, or None.")
    floor = torch.maximum(surrogate, dual_clip * advantages)
    return torch.where(advantages < 0, floor, surrogate)


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
    check_same_shape(logprobs=logprobs, advantages=advantages, mask=mask)
    ratio = policy_ratio(zero_masked(logprobs, mask), zero_masked(old_logprobs, mask))
    if normalize:
        advantages = whiten(advantages, mask, eps=eps)
    # the minimum of `ppo_surrogate`, written out where a reader of the loop comes to look for it
    clipped_ratio = ratio.clip(1 - clip_coef, 1 + clip_coef)
    surrogate = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    return masked_mean(surrogate, mask, denominator=denominator)


def gspo_surrogate(
    logprobs: Float[Tensor, "batch gen"],
    old_logprobs: Float[Tensor, "batch gen"],
    advantages: Float[Tensor, "batch gen"],
    clip_coef: float,
    clip_coef_high: float | None = None,
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, "batch gen"]:
    """Clip the ratio of the whole response, not that of each token, since the reward is for it.

    1. Take the ratio of each sequence, as a number (see `sequence_ratio`).
    2. Let each token carry it: in value all the same, in gradient through its own log-probability,
       and without gradient where the ratio is held at its limit, as in `policy_ratio`.
    3. Go on as PPO does, with clips about a hundred times smaller.

    To be aggregated by "sequence_mean"; then, with one advantage per sequence, value and gradient
    are those of min(s_i A_i, clip(s_i) A_i). Raises ValueError if a clip is negative or the mask
    has another shape.

    s_it = sg[s_i] * pi(y_it) / sg[pi(y_it)], sg: without gradient   (Zheng et al. 2025, GSPO, arXiv
    2507.18071, section 4.3)
    """
    low, high = _clip_range(clip_coef, clip_coef_high)
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    whole = _mean_log_ratio(logprobs, old_logprobs, mask).detach()[:, None]
    logprobs, advantages = _blank(mask, logprobs, advantages)
    ratio = (whole + (logprobs - logprobs.detach())).clamp(max=MAX_LOG_RATIO).exp()
    return torch.minimum(ratio * advantages, ratio.clip(low, high) * advantages)


def cispo_surrogate(
    logprobs: Float[Tensor, "batch gen"],
    old_logprobs: Float[Tensor, "batch gen"],
    advantages: Float[Tensor, "batch gen"],
    clip_coef: float,
    clip_coef_high: float | None = None,
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, "batch gen"]:
    """Clip the weight of each token's gradient, so that no token loses its gradient altogether.

    1. Clip the ratio to between 1 - clip_coef and 1 + clip_coef_high, and take it as a number.
    2. Multiply advantage and log-probability by it.

    Its gradient counts; its value has no meaning. Raises ValueError if a clip is negative or the
    mask has another shape.

    sg[clip(r, 1 - e_low, 1 + e_high)] A log pi   (MiniMax 2025, CISPO, arXiv 2506.13585)
    """
    low, high = _clip_range(clip_coef, clip_coef_high)
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    logprobs, old_logprobs, advantages = _blank(mask, logprobs, old_logprobs, advantages)
    weight = policy_ratio(logprobs, old_logprobs).detach().clip(low, high)
    return weight * advantages * logprobs


def policy_gradient_surrogate(
    logprobs: Float[Tensor, "batch gen"],
    advantages: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, "batch gen"]:
    """Weigh each token's log-probability with its advantage: REINFORCE, good for one step only.

    1. Blank the inputs at masked tokens.
    2. Multiply.

    Its gradient is right only while the policy is still the one that sampled; its value has no
    meaning. Raises ValueError if the mask has another shape.

    A log pi   (Williams 1992; Sutton et al. 1999)
    """
    check_same_shape(logprobs=logprobs, advantages=advantages, mask=mask)
    logprobs, advantages = _blank(mask, logprobs, advantages)
    return advantages * logprobs


def policy_gradient_objective(
    logprobs: Float[Tensor, "batch gen"],
    advantages: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, ""]:
    """Give the number whose gradient is the policy gradient, to be maximised: mean of A log pi.

    1. Put 0 where the mask is False, in the log-probabilities and in the advantages.
    2. Take the advantages as numbers: no gradient goes through them.
    3. Multiply, and average over the real tokens.

    Its gradient is right only while the policy is still the one that sampled; its value has no
    meaning. Raises ValueError if the mask has another shape.

    grad J = E[sum_t A_t grad log pi(a_t | s_t)]   (Williams 1992; Sutton et al. 1999; here as a
    mean over tokens)
    """
    check_same_shape(logprobs=logprobs, advantages=advantages, mask=mask)
    logprobs = zero_masked(at_least_float32(logprobs), mask)
    advantages = zero_masked(at_least_float32(advantages), mask)
    return masked_mean(logprobs * advantages.detach(), mask)


def truncated_importance_weights(
    logprobs: Float[Tensor, "batch gen"],
    sampler_logprobs: Float[Tensor, "batch gen"],
    cap: float,
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, "batch gen"]:
    """Weight tokens by their probability over the sampler's, up to a cap, without gradient.

    Multiply a surrogate by it if another program samples. Masked tokens have weight 0. Raises
    ValueError unless cap > 0, or if the mask has another shape.

    min(rho, cap),  rho = pi / pi_sampler   (Espeholt et al. 2018, IMPALA, arXiv 1802.01561)
    """
    if not cap > 0:
        raise ValueError(f"cap is {cap}; give a number above 0, such as 2.")
    check_same_shape(logprobs=logprobs, sampler_logprobs=sampler_logprobs, mask=mask)
    logprobs, sampler_logprobs = _blank(mask, logprobs, sampler_logprobs)
    weights = policy_ratio(logprobs, sampler_logprobs).detach().clamp(max=cap)
    return zero_masked(weights, mask)


def masked_importance_weights(
    logprobs: Float[Tensor, "batch gen"],
    sampler_logprobs: Float[Tensor, "batch gen"],
    cap: float,
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, "batch gen"]:
    """Weight tokens as `truncated_importance_weights`, with 0 instead of the cap above it.

    rho 1[rho <= cap],  rho = pi / pi_sampler   (masked importance sampling, TRL's `token_mask`)
    """
    weights = truncated_importance_weights(logprobs, sampler_logprobs, torch.inf, mask)
    return weights.masked_fill(weights > cap, 0.0)


def _mean_log_ratio(
    logprobs: Float[Tensor, "batch gen"],
    old_logprobs: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"] | None,
) -> Float[Tensor, " batch"]:
    """The mean over the real tokens of log(pi / pi_old), for each sequence."""
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
    logprobs, old_logprobs = _blank(mask, logprobs, old_logprobs)
    return masked_mean(logprobs - old_logprobs, mask, dim=-1)


def _blank(mask: Tensor | None, *tensors: Tensor) -> list[Tensor]:
    """The tensors in at least float32, with 0 where the mask is False."""
    return [zero_masked(at_least_float32(x), mask) for x in tensors]


def _clip_range(clip_coef: float, clip_coef_high: float | None) -> tuple[float, float]:
    """The lowest and the highest ratio that is not clipped."""
    high = clip_coef if clip_coef_high is None else clip_coef_high
    for name, value in (("clip_coef", clip_coef), ("clip_coef_high", high)):
        if value < 0:
            raise ValueError(f"{name} is {value}; give a number of at least 0, such as 0.2.")
    return 1 - clip_coef, 1 + high
