"""Policy losses, to be maximized: PPO's clipped surrogate, GSPO, CISPO, plain policy gradient."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.functional.dispatch import call_by_name, check_result, look_up
from rlhf_lab.functional.masks import at_least_float32, check_same_shape, zero_masked
from rlhf_lab.functional.moments import Aggregation, Denominator, aggregate, masked_mean, whiten

MAX_LOG_RATIO = 20.0


def policy_ratio(
    logprobs: Float[Tensor, "batch gen"], old_logprobs: Float[Tensor, "batch gen"]
) -> Float[Tensor, "batch gen"]:
    """Compute the ratio of each sampled token's probability now to that when it was sampled.

    1. Subtract the old log-probability from the new one.
    2. Limit the difference to 20: a ratio of 5e8 is far outside any clip range, and float32
       would overflow at 88, which puts nan into gradients that clipping should have made 0.
    3. Take the exponential.

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
    """Compute the geometric mean of each response's ratios, at most e^20; 1 without a real token.

    s_i = (pi(y_i | x) / pi_old(y_i | x))^(1 / |y_i|)   (GSPO, arXiv 2507.18071, section 4.1)
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
    """Compute PPO's clipped surrogate of each token, with two clips and a dual clip if set.

    min(r A, clip(r, 1 - e_low, 1 + e_high) A)   (Schulman et al. 2017, arXiv 1707.06347, equation
    7; two clips, "clip-higher": Yu et al. 2025, DAPO, arXiv 2503.14476, section 3.1), and with dual
    clip max(that, c A) where A < 0, c > 1   (Ye et al. 2020, arXiv 1912.09729)
    """
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be greater than 1, got {dual_clip}.")
    low, high = _clip_range(clip_coef, clip_coef_high)
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    logprobs, old_logprobs, advantages = _blank(mask, logprobs, old_logprobs, advantages)
    ratio = policy_ratio(logprobs, old_logprobs)
    surrogate = torch.minimum(ratio * advantages, ratio.clip(low, high) * advantages)
    if dual_clip is None:
        return surrogate
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
    """Compute PPO's clipped surrogate objective, which is to be maximized.

    1. Blank the log-probabilities at masked tokens.
    2. If `normalize`, whiten the advantages over the real tokens.
    3. Take the ratio of new to old probability, and a copy of it clipped to within clip_coef of 1.
    4. Multiply both by the advantage, and take the smaller product at each token.
    5. Average over the real tokens.

    `denominator` works as in `masked_mean`. Before you split a minibatch into pieces, whiten its
    advantages, and pass `normalize=False`. Raises ValueError if clip_coef is negative.

    L = mean_t min(r_t A_t, clip(r_t, 1 - clip_coef, 1 + clip_coef) A_t)
    (Schulman et al. 2017, PPO, arXiv 1707.06347, equation 7)
    """
    if clip_coef < 0:
        raise ValueError(f"clip_coef must be at least 0, got {clip_coef}.")
    check_same_shape(logprobs=logprobs, advantages=advantages, mask=mask)
    ratio = policy_ratio(zero_masked(logprobs, mask), zero_masked(old_logprobs, mask))
    if normalize:
        advantages = whiten(advantages, mask, eps=eps)
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
    """Clip the ratio of the whole response (see `sequence_ratio`), since the reward is for it.

    Each token has the sequence's ratio as its value, and the gradient of its log-probability.
    Aggregate by "sequence_mean", with clips about 100 times smaller than PPO's.

    s_it = sg[s_i] * pi(y_it) / sg[pi(y_it)], sg: without gradient   (Zheng et al. 2025, GSPO, arXiv
    2507.18071, section 4.3)
    """
    low, high = _clip_range(clip_coef, clip_coef_high)
    check_same_shape(logprobs=logprobs, advantages=advantages)
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
    """Clip the weight of each token's gradient, which never becomes 0. The value has no meaning.

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
    """Compute A log pi of each token: REINFORCE, whose gradient is right for one step only.

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
    """Compute the mean of A log pi, whose gradient is the policy gradient; maximize it.

    1. Put 0 where the mask is False, in the log-probabilities and in the advantages.
    2. Treat the advantages as constants: no gradient flows through them.
    3. Multiply, and average over the real tokens.

    The gradient is correct only while the policy is still the one that generated the samples.

    grad J = E[sum_t A_t grad log pi(a_t | s_t)]   (Williams 1992; Sutton et al. 1999; here as a
    mean over tokens)
    """
    check_same_shape(logprobs=logprobs, advantages=advantages, mask=mask)
    logprobs = zero_masked(at_least_float32(logprobs), mask)
    advantages = zero_masked(at_least_float32(advantages), mask)
    return masked_mean(logprobs * advantages.detach(), mask)


# policy objectives by name
POLICY_OBJECTIVES: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        "ppo": ppo_surrogate,
        "gspo": gspo_surrogate,
        "cispo": cispo_surrogate,
        "policy_gradient": policy_gradient_surrogate,
    }
)


def calc_policy_objective(
    objective: str | Callable[..., Tensor],
    logprobs: Float[Tensor, "batch gen"],
    old_logprobs: Float[Tensor, "batch gen"],
    advantages: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"],
    *,
    clip_coef: float = 0.2,
    clip_coef_high: float | None = None,
    dual_clip: float | None = None,
    normalize: bool = False,
    aggregation: Aggregation = "token_mean",
    denominator: Denominator = None,
) -> Float[Tensor, ""]:
    """Compute an objective of `POLICY_OBJECTIVES`, or of a function, and aggregate it; maximized.

    The function gets the arguments before `normalize` that its parameters name (`*args`: logprobs,
    old_logprobs, advantages, clip_coef, mask). If `normalize`, advantages are whitened over the
    tokens of this batch. Raises ValueError for an unknown name, a parameter without a value, and a
    setting without a parameter.
    """
    field, function = "policy_objective", look_up(objective, POLICY_OBJECTIVES, "policy_objective")
    advantages = whiten(advantages, mask) if normalize else advantages
    available = dict(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    available |= dict(clip_coef=clip_coef, mask=mask)
    settings = dict(clip_coef_high=clip_coef_high, dual_clip=dual_clip)
    result = call_by_name(function, available, field, tuple(available), settings)
    return aggregate(check_result(field, result, mask.shape), mask, aggregation, denominator)


def _mean_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor | None) -> Tensor:
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
    logprobs, old_logprobs = _blank(mask, logprobs, old_logprobs)
    return masked_mean(logprobs - old_logprobs, mask, dim=-1)


def _blank(mask: Tensor | None, *tensors: Tensor) -> list[Tensor]:
    return [zero_masked(at_least_float32(x), mask) for x in tensors]


def _clip_range(clip_coef: float, clip_coef_high: float | None) -> tuple[float, float]:
    high = clip_coef if clip_coef_high is None else clip_coef_high
    if not (clip_coef >= 0 and high >= 0):
        raise ValueError(f"{clip_coef=} and {clip_coef_high=} must be at least 0.")
    return 1 - clip_coef, 1 + high
