"""Preference losses of a policy, without a reward model: DPO, IPO, KTO and ORPO."""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_lab.functional.masks import at_least_float32, check_same_shape
from rlhf_lab.functional.preference import refuse_no_pairs

__all__ = [
    "dpo_loss",
    "implicit_rewards",
    "kto_loss",
    "kto_reference_point",
    "log_odds",
    "orpo_loss",
]


def implicit_rewards(
    policy: Float[Tensor, " batch"], ref: Float[Tensor, " batch"], beta: float
) -> Float[Tensor, " batch"]:
    """Read the reward that a policy trained by DPO implies for each response.

    Takes log-probabilities summed over each response. Right up to a constant of the prompt, which a
    pair has in common. Raises ValueError unless beta > 0.

    r = beta * (log pi(y | x) - log pi_ref(y | x))   (Rafailov et al. 2023, arXiv 2305.18290,
    equation 5)
    """
    if not beta > 0:
        raise ValueError(f"beta is {beta}; give a number above 0, such as 0.1.")
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
    """Train the policy on preferences directly, without a reward model; to be minimised.

    1. h = how much more the policy prefers the chosen response than the reference does, from
       log-probabilities summed over each response (see `sequence_sum`).
    2. "sigmoid": minus log-sigmoid of beta * h, with a share `label_smoothing` of the pairs taken
       to be labelled the wrong way round.
    3. "ipo": the squared distance of h from 1 / (2 beta).
    4. Average over the pairs.

    Raises ValueError unless beta > 0 and 0 <= label_smoothing < 0.5, for label_smoothing with
    "ipo", where it has no meaning, and if there is no pair.

    h = (log pi(c) - log pi(r)) - (log pi_ref(c) - log pi_ref(r))
    DPO: -mean log sigmoid(beta h)   (Rafailov et al. 2023, arXiv 2305.18290, equation 7)
    cDPO: -mean [(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)]   (Mitchell 2023)
    IPO: mean (h - 1 / (2 beta))^2   (Azar et al. 2023, arXiv 2310.12036, equation 17)
    """
    if not beta > 0:
        raise ValueError(f"beta is {beta}; give a number above 0, such as 0.1.")
    if not 0 <= label_smoothing < 0.5 or (kind == "ipo" and label_smoothing):
        raise ValueError(
            f"label_smoothing is {label_smoothing} with kind {kind!r}; give a number from 0 to "
            "below 0.5 for 'sigmoid', and 0 for 'ipo'."
        )
    check_same_shape(
        policy_chosen=policy_chosen,
        policy_rejected=policy_rejected,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
    )
    refuse_no_pairs(policy_chosen)
    policy_log_ratio = at_least_float32(policy_chosen) - at_least_float32(policy_rejected)
    ref_log_ratio = at_least_float32(ref_chosen) - at_least_float32(ref_rejected)
    h = policy_log_ratio - ref_log_ratio
    if kind == "ipo":
        return (h - 1 / (2 * beta)).square().mean()
    if kind == "sigmoid":
        right, wrong = logsigmoid(beta * h), logsigmoid(-beta * h)
        return -((1 - label_smoothing) * right + label_smoothing * wrong).mean()
    raise ValueError(f"kind is {kind!r}; give 'sigmoid' or 'ipo'.")


def kto_reference_point(
    policy: Float[Tensor, " batch"], ref: Float[Tensor, " batch"]
) -> Float[Tensor, ""]:
    """Estimate the KL of the policy from the reference, above which a response counts as a gain.

    1. Take the log-ratio of each response, from log-probabilities summed over it. For KTO, each
       prompt is put together with the response to another prompt of the batch.
    2. Average, and raise the mean to 0 if it is below, which no KL is.
    3. Detach it: it has no gradient.

    In nats per sequence. Raises ValueError if there is no response.

    z_0 = max(0, mean_i log pi(y_j | x_i) / pi_ref(y_j | x_i)), j != i
    (Ethayarajh et al. 2024, arXiv 2402.01306, section 4.1)
    """
    check_same_shape(policy=policy, ref=ref)
    refuse_no_pairs(policy, "response")
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
    """Train the policy on responses that are judged one by one, good or bad; to be minimised.

    1. Take the implicit reward of each response, less beta times the reference point (see
       `kto_reference_point`).
    2. Turn its sign where the response is bad, and take the sigmoid: the value of it.
    3. Weigh what is missing to the value 1 by `good_weight` or `bad_weight`, and average.

    Takes log-probabilities summed over each response. Raises ValueError unless beta > 0 and the
    weights are at least 0, and if there is no response.

    loss = mean [lambda_y - v],  r = log pi(y | x) / pi_ref(y | x)
    v = lambda_D sigmoid(beta (r - z_0)) if good, lambda_U sigmoid(beta (z_0 - r)) if bad
    (Ethayarajh et al. 2024, arXiv 2402.01306, equation 8)
    """
    for name, weight in (("good_weight", good_weight), ("bad_weight", bad_weight)):
        if not weight >= 0:
            raise ValueError(f"{name} is {weight}; give a number of at least 0, such as 1.")
    check_same_shape(policy=policy, ref=ref, is_good=is_good)
    refuse_no_pairs(policy, "response")
    gain = implicit_rewards(policy, ref, beta) - beta * reference_point
    # 1 - sigmoid(x) = sigmoid(-x), which keeps its digits where the value is nearly 1
    return torch.where(is_good, good_weight * (-gain).sigmoid(), bad_weight * gain.sigmoid()).mean()


def log_odds(logprobs: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Give the logarithm of the odds of an event, from the logarithm of its probability.

    1. Hold the probability below 1 by one step of its number format: certainty has infinite odds.
    2. Take the logarithm of 1 - p, by log(-expm1(x)) where p > 1/2, and by log1p(-exp(x)) below,
       where each is exact (Maechler 2012).
    3. Take the difference.

    log odds = log p - log(1 - p)
    """
    logp = at_least_float32(logprobs)
    logp = logp.clamp(max=-torch.finfo(logp.dtype).eps)
    is_likely = logp > -0.6931472
    # each branch sees only its own numbers, since 0 * inf in the other would be nan in the gradient
    likely = (-logp.masked_fill(~is_likely, -1.0).expm1()).log()
    unlikely = (-logp.masked_fill(is_likely, -1.0).exp()).log1p()
    return logp - torch.where(is_likely, likely, unlikely)


def orpo_loss(
    chosen: Float[Tensor, " batch"], rejected: Float[Tensor, " batch"], odds_weight: float
) -> Float[Tensor, ""]:
    """Train the policy on preferences while it is fine-tuned, without a reference; minimised.

    1. Take the surprise at the chosen response, from the mean log-probability of its tokens.
    2. Take minus the log-sigmoid of by how much its log odds exceed those of the rejected one.
    3. Add the second, `odds_weight` times, to the first, and average over the pairs.

    Takes log-probabilities averaged over each response's tokens. Raises ValueError if odds_weight
    is negative or there is no pair.

    loss = mean [-log P(c) - lambda log sigmoid(log odds(c) - log odds(r))]
    odds = P / (1 - P), log P(y | x) = 1/m sum_t log pi(y_t | x, y_<t)
    (Hong et al. 2024, arXiv 2403.07691, equations 6 and 7; lambda is `odds_weight`)
    """
    if not odds_weight >= 0:
        raise ValueError(f"odds_weight is {odds_weight}; give a number of at least 0, such as 0.1.")
    check_same_shape(chosen=chosen, rejected=rejected)
    refuse_no_pairs(chosen)
    preferred = logsigmoid(log_odds(chosen) - log_odds(rejected))
    return -(at_least_float32(chosen) + odds_weight * preferred).mean()
