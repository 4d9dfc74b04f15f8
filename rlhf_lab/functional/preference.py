"""Preferences: a rater, the Bradley-Terry losses of a reward model, calibration; SFT."""

from typing import NamedTuple

import torch
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
    "Calibration",
    "auc",
    "bradley_terry_loss",
    "bradley_terry_token_loss",
    "calibration_bins",
    "divergence_mask",
    "preference_accuracy",
    "sample_preferences",
    "sft_loss",
]


def sample_preferences(
    gaps: Float[Tensor, " pair"],
    uniforms: Float[Tensor, " pair"],
    temperature: float = 1.0,
    flip_rate: float = 0.0,
) -> Bool[Tensor, " pair"]:
    """Let a rater choose between the two texts of each pair; True where the first one wins.

    1. Divide the gap, the utility of the first text less that of the second, by the temperature.
    2. Its sigmoid is the probability that the rater prefers the first text.
    3. With probability `flip_rate` the label is noted down the wrong way round; take the
       probability that the *label* says the first one.
    4. The first one wins where the uniform number is below that.

    Raises ValueError unless temperature > 0 and 0 <= flip_rate <= 1.

    P(first) = (1 - e) sigmoid(d / T) + e sigmoid(-d / T)   (Bradley and Terry 1952)
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; give a number above 0, such as 1.")
    if not 0 <= flip_rate <= 1:
        raise ValueError(f"flip_rate is {flip_rate}; give a share from 0 to 1, such as 0.1.")
    check_same_shape(gaps=gaps, uniforms=uniforms)
    prefers = (at_least_float32(gaps) / temperature).sigmoid()
    says = (1 - flip_rate) * prefers + flip_rate * (1 - prefers)
    return uniforms < says


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
    refuse_no_pairs(chosen)
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
    refuse_no_pairs(chosen)
    check_same_shape(chosen=chosen, rejected=rejected)
    difference = at_least_float32(chosen) - at_least_float32(rejected)
    return (difference.sign() + 1).mean() / 2


class Calibration(NamedTuple):
    """What a judge predicted of pairs, and what happened, bin by bin from low to high.

    Args:
        predicted: the mean probability, of the bin's pairs, that the first text wins.
        observed: the share of them in which it won.
        count: how many pairs there are.
    """

    predicted: Float[Tensor, " bin"]
    observed: Float[Tensor, " bin"]
    count: Int[Tensor, " bin"]


def calibration_bins(
    gaps: Float[Tensor, " pair"], outcomes: Bool[Tensor, " pair"], n_bins: int
) -> Calibration:
    """Hold the probabilities that a judge gives against how often the first text of a pair wins.

    1. The judge's probability is the sigmoid of its gap, the score of the first text less that of
       the second.
    2. Sort the pairs by their gaps, and cut them into bins of equal counts, or of counts that
       differ by 1.
    3. In each bin take the mean probability, the share of pairs that the first text won, and the
       count, as `Calibration(predicted, observed, count)`.

    A judge is calibrated where both agree. Which text is the first must not depend on which one
    won. In float64. Raises ValueError unless there are from 1 to as many bins as pairs.
    """
    check_same_shape(gaps=gaps, outcomes=outcomes)
    if not 1 <= n_bins <= len(gaps):
        raise ValueError(f"n_bins is {n_bins} for {len(gaps)} pairs; give 1 to {len(gaps)}.")
    ordered, order = gaps.detach().cpu().double().sort(stable=True)
    predicted, won = ordered.sigmoid(), outcomes.cpu().double()[order]
    bins = list(zip(predicted.tensor_split(n_bins), won.tensor_split(n_bins), strict=True))
    return Calibration(
        predicted=torch.stack([chance.mean() for chance, _ in bins]),
        observed=torch.stack([share.mean() for _, share in bins]),
        count=torch.tensor([len(chance) for chance, _ in bins]),
    )


def auc(scores: Float[Tensor, "*site n"], labels: Bool[Tensor, " n"]) -> Float[Tensor, "*site"]:
    """Give the chance that a positive example scores higher than a negative one (ROC AUC).

    1. Compare each positive example with each negative one.
    2. Count a comparison that is won as 1, and a tie as one half, and average.

    In float64; nan where one of the kinds is missing.

    AUC = P(s+ > s-) + P(s+ = s-) / 2   (Mann and Whitney 1947)
    """
    positive, negative = scores[..., labels], scores[..., ~labels]
    gap = positive[..., :, None] - negative[..., None, :]
    return ((gap > 0).double() + 0.5 * (gap == 0).double()).mean((-2, -1))


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


def refuse_no_pairs(batch: Tensor, what: str = "pair") -> None:
    """Refuse an empty batch, whose mean would be nan."""
    if not len(batch):
        raise ValueError(f"there is no {what} to average over; give at least one.")
