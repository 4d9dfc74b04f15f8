"""Losses of a policy on good, bad and preferred texts, minimized: SFT, DPO, IPO, KTO and ORPO."""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_lab.functional.masks import at_least_float32, check_same_shape
from rlhf_lab.functional.moments import Denominator, masked_mean
from rlhf_lab.functional.preference import check_not_empty


def sft_loss(
    logprobs: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"] | None = None,
    denominator: Denominator = None,
) -> Float[Tensor, ""]:
    """Compute the mean surprise at the tokens of given responses, in nats per token.

    loss = -mean_t log pi(a_t | s_t)
    """
    return -masked_mean(logprobs, mask, denominator=denominator)


def implicit_rewards(
    policy: Float[Tensor, " batch"], ref: Float[Tensor, " batch"], beta: float
) -> Float[Tensor, " batch"]:
    """Compute the reward that a policy trained by DPO implies for each response.

    Takes log-probabilities summed over each response. The result is right up to a constant for each
    prompt, which cancels within a pair. Raises ValueError unless beta > 0.

    r = beta * (log pi(y | x) - log pi_ref(y | x))   (Rafailov et al. 2023, arXiv 2305.18290)
    """
    if not beta > 0:
        raise ValueError(f"beta must be greater than 0, got {beta}.")
    check_same_shape(policy=policy, ref=ref)
    return beta * (at_least_float32(policy) - at_least_float32(ref))


def dpo_loss(
    policy_chosen: Float[Tensor, " batch"],
    policy_rejected: Float[Tensor, " batch"],
    ref_chosen: Float[Tensor, " batch"],
    ref_rejected: Float[Tensor, " batch"],
    beta: float,
    label_smoothing: float = 0.0,
    kind: Literal["sigmoid", "ipo"] = "sigmoid",
) -> Float[Tensor, ""]:
    """Compute the loss that trains a policy directly on preferences (to be minimized).

    1. Compute h: how much more strongly the policy prefers the chosen response than the reference
       does. All log-probabilities are sums over a response (see `sequence_sum`).
    2. "sigmoid": minus log-sigmoid of beta * h, under the assumption that a fraction
       `label_smoothing` of the pairs is labeled the wrong way round.
    3. "ipo": the squared distance between h and 1 / (2 beta).
    4. Average over the pairs.

    Raises ValueError unless beta > 0 and 0 <= label_smoothing < 0.5 (0 with "ipo"), or if there is
    no pair.

    h = (log pi(c) - log pi(r)) - (log pi_ref(c) - log pi_ref(r))
    DPO: -mean log sigmoid(beta h)   (Rafailov et al. 2023, arXiv 2305.18290, equation 7)
    cDPO: -mean [(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)]   (Mitchell 2023)
    IPO: mean (h - 1 / (2 beta))^2   (Azar et al. 2023, arXiv 2310.12036, equation 17)
    """
    if not beta > 0:
        raise ValueError(f"beta must be greater than 0, got {beta}.")
    if not 0 <= label_smoothing < 0.5 or (kind == "ipo" and label_smoothing):
        raise ValueError(
            f"label_smoothing is {label_smoothing} with kind {kind!r}. Use a number from 0 to "
            "below 0.5 with 'sigmoid', and 0 with 'ipo'."
        )
    check_same_shape(
        policy_chosen=policy_chosen,
        policy_rejected=policy_rejected,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
    )
    check_not_empty(policy_chosen)
    policy_log_ratio = at_least_float32(policy_chosen) - at_least_float32(policy_rejected)
    ref_log_ratio = at_least_float32(ref_chosen) - at_least_float32(ref_rejected)
    h = policy_log_ratio - ref_log_ratio
    if kind == "ipo":
        return (h - 1 / (2 * beta)).square().mean()
    if kind == "sigmoid":
        right, wrong = logsigmoid(beta * h), logsigmoid(-beta * h)
        return -((1 - label_smoothing) * right + label_smoothing * wrong).mean()
    raise ValueError(f"Unknown kind {kind!r}. Choose one of: sigmoid, ipo.")


def kto_reference_point(
    policy: Float[Tensor, " batch"], ref: Float[Tensor, " batch"]
) -> Float[Tensor, ""]:
    """Estimate the KL of the policy from the reference, above which a response counts as a gain.

    Takes log-probabilities summed over each response to another prompt of the batch. In nats per
    sequence, without gradient. Raises ValueError for an empty batch.

    z_0 = max(0, mean_i log pi(y_j | x_i) / pi_ref(y_j | x_i)), j != i
    (Ethayarajh et al. 2024, arXiv 2402.01306, section 4.1)
    """
    check_same_shape(policy=policy, ref=ref)
    check_not_empty(policy, "response")
    log_ratio = at_least_float32(policy) - at_least_float32(ref)
    return log_ratio.mean().clamp(min=0).detach()


def kto_loss(
    policy: Float[Tensor, " batch"],
    ref: Float[Tensor, " batch"],
    is_good: Bool[Tensor, " batch"],
    reference_point: float | Float[Tensor, ""],
    beta: float,
    good_weight: float = 1.0,
    bad_weight: float = 1.0,
) -> Float[Tensor, ""]:
    """Compute the loss of a policy on responses that are labeled good or bad, one by one.

    Takes log-probabilities summed over each response and a `kto_reference_point`. Raises ValueError
    unless beta > 0, or if there is no response.

    loss = mean [lambda_y - v],  r = log pi(y | x) / pi_ref(y | x)
    v = lambda_D sigmoid(beta (r - z_0)) if good, lambda_U sigmoid(beta (z_0 - r)) if bad
    (Ethayarajh et al. 2024, arXiv 2402.01306, equation 8)
    """
    check_same_shape(policy=policy, ref=ref, is_good=is_good)
    check_not_empty(policy, "response")
    if not (good_weight >= 0 and bad_weight >= 0):
        raise ValueError(f"{good_weight=} and {bad_weight=} must be at least 0. Pass such weights.")
    gain = implicit_rewards(policy, ref, beta) - beta * reference_point
    # 1 - sigmoid(x) = sigmoid(-x), which keeps its digits where the value is nearly 1
    return torch.where(is_good, good_weight * (-gain).sigmoid(), bad_weight * gain.sigmoid()).mean()


def log_odds(logprobs: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Compute the log odds of an event from its log-probability, limited to one step below 0.

    log odds = log p - log(1 - p)
    """
    logp = at_least_float32(logprobs)
    logp = logp.clamp(max=-torch.finfo(logp.dtype).eps)
    return logp - (-logp.expm1()).log()


def orpo_loss(
    chosen: Float[Tensor, " batch"], rejected: Float[Tensor, " batch"], odds_weight: float
) -> Float[Tensor, ""]:
    """Compute the loss of fine-tuning on the chosen text and of preferring it, without a reference.

    Takes log-probabilities averaged over each response's tokens. Raises ValueError without a pair.

    loss = mean [-log P(c) - lambda log sigmoid(log odds(c) - log odds(r))]
    odds = P / (1 - P), log P(y | x) = 1/m sum_t log pi(y_t | x, y_<t)
    (Hong et al. 2024, arXiv 2403.07691, equations 6 and 7; lambda is `odds_weight`)
    """
    check_same_shape(chosen=chosen, rejected=rejected)
    check_not_empty(chosen)
    preferred = logsigmoid(log_odds(chosen) - log_odds(rejected))
    return -(at_least_float32(chosen) + odds_weight * preferred).mean()
