"""Preference losses: Bradley-Terry, DPO, and supervised fine-tuning on good examples."""

from typing import Literal

from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_lab.functional.aggregation import aggregate
from rlhf_lab.functional.masks import (
    Denominator,
    at_least_float32,
    check_same_shape,
    masked_mean,
    zero_masked,
)

__all__ = [
    "bradley_terry_loss",
    "bradley_terry_token_loss",
    "divergence_mask",
    "dpo_loss",
    "implicit_rewards",
    "preference_accuracy",
    "sft_loss",
]


def bradley_terry_loss(
    chosen: Float[Tensor, " batch"],
    rejected: Float[Tensor, " batch"],
    margin: float | Float[Tensor, " batch"] = 0.0,
    center_coef: float = 0.0,
) -> Float[Tensor, ""]:
    """Train a reward model to score the chosen response above the rejected one; to be minimised.

    1. Take the difference of the two rewards, less the margin.
    2. Take minus the log-sigmoid of it, the surprise at the preference that was given.
    3. Add `center_coef` times the square of the sum of the two rewards, which holds their mean near
       0 (preferences alone leave it free).
    4. Average over the pairs.

    Without margin and centring this is also mean log(1 + exp(r_rejected - r_chosen)). Raises
    ValueError if center_coef is negative or there is no pair.

    loss = mean [-log sigmoid(r_chosen - r_rejected - margin) + c (r_chosen + r_rejected)^2]
    (Bradley and Terry 1952; Ouyang et al. 2022, arXiv 2203.02155, equation 1; margin: Touvron et
    al. 2023, arXiv 2307.09288, equation 2; centring: Eisenstein et al. 2023, arXiv 2312.09244)
    """
    if center_coef < 0:
        raise ValueError(
            f"center_coef is {center_coef}; give a number of at least 0, such as 0.01."
        )
    _refuse_no_pairs(chosen)
    check_same_shape(chosen=chosen, rejected=rejected)
    if isinstance(margin, Tensor) and margin.ndim:
        check_same_shape(chosen=chosen, margin=margin)
    chosen, rejected = at_least_float32(chosen), at_least_float32(rejected)
    loss = -logsigmoid(chosen - rejected - margin)
    if center_coef:
        loss = loss + center_coef * (chosen + rejected).square()
    return loss.mean()


def divergence_mask(
    chosen_tokens: Int[Tensor, "batch seq"],
    rejected_tokens: Int[Tensor, "batch seq"],
    chosen_mask: Bool[Tensor, "batch seq"],
    rejected_mask: Bool[Tensor, "batch seq"],
) -> Bool[Tensor, "batch seq"]:
    """Mark the positions at which the two responses of a pair can be told apart.

    1. Find the positions where their tokens differ, or where only one of them goes on.
    2. Mark from the first such position to the end of the longer response (right padding).

    What the pair has in common, the prompt above all, is left out; equal responses leave nothing.
    """
    check_same_shape(
        chosen_tokens=chosen_tokens,
        rejected_tokens=rejected_tokens,
        chosen_mask=chosen_mask,
        rejected_mask=rejected_mask,
    )
    either = chosen_mask | rejected_mask
    differ = either & ((chosen_tokens != rejected_tokens) | (chosen_mask != rejected_mask))
    return either & (differ.long().cumsum(dim=-1) > 0)


def bradley_terry_token_loss(
    chosen: Float[Tensor, "batch seq"],
    rejected: Float[Tensor, "batch seq"],
    mask: Bool[Tensor, "batch seq"],
) -> Float[Tensor, ""]:
    """Train a reward model on every position after two responses part, not on the last alone.

    1. Take minus the log-sigmoid of the difference of the two rewards at each position.
    2. Average over the positions that are marked (see `divergence_mask`), pair by pair.
    3. Average over the pairs that have any.

    To be minimised. It is Bradley-Terry with a guess at the outcome from every prefix (torchrl's
    reward model loss). Raises ValueError if the mask has another shape.

    loss = mean_i mean_t -log sigmoid(r_chosen,it - r_rejected,it)
    """
    check_same_shape(chosen=chosen, rejected=rejected, mask=mask)
    chosen, rejected = zero_masked(chosen, mask), zero_masked(rejected, mask)
    loss = -logsigmoid(at_least_float32(chosen) - at_least_float32(rejected))
    return aggregate(loss, mask, "sequence_mean")


def preference_accuracy(
    chosen: Float[Tensor, " batch"], rejected: Float[Tensor, " batch"]
) -> Float[Tensor, ""]:
    """Give the share of pairs in which the chosen response has the higher reward.

    1. Count a pair that is won as 1, and a tie as one half.
    2. Average over the pairs.

    Raises ValueError if there is no pair.
    """
    _refuse_no_pairs(chosen)
    check_same_shape(chosen=chosen, rejected=rejected)
    difference = at_least_float32(chosen) - at_least_float32(rejected)
    return (difference.sign() + 1).mean() / 2


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


def sft_loss(
    logprobs: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"] | None = None,
    denominator: Denominator = None,
) -> Float[Tensor, ""]:
    """Train the policy to write given responses: the mean surprise at their tokens, minimised.

    In nats per token. `denominator` as in `masked_mean`. Raises ValueError if the mask has another
    shape.

    loss = -mean_t log pi(a_t | s_t)
    """
    return -masked_mean(logprobs, mask, denominator=denominator)


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
    _refuse_no_pairs(policy_chosen)
    policy_log_ratio = at_least_float32(policy_chosen) - at_least_float32(policy_rejected)
    ref_log_ratio = at_least_float32(ref_chosen) - at_least_float32(ref_rejected)
    h = policy_log_ratio - ref_log_ratio
    if kind == "ipo":
        return (h - 1 / (2 * beta)).square().mean()
    if kind == "sigmoid":
        right, wrong = logsigmoid(beta * h), logsigmoid(-beta * h)
        return -((1 - label_smoothing) * right + label_smoothing * wrong).mean()
    raise ValueError(f"kind is {kind!r}; give 'sigmoid' or 'ipo'.")


def _refuse_no_pairs(chosen: Tensor) -> None:
    """Refuse an empty batch, whose mean would be nan."""
    if not len(chosen):
        raise ValueError("there is no pair to average over; give at least one.")
