"""Preferences: a rater, Bradley-Terry losses of a reward model, accuracy, AUC and calibration."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_lab.functional.masks import at_least_float32, check_same_shape, zero_masked
from rlhf_lab.functional.moments import aggregate


def sample_preferences(
    gaps: Float[Tensor, " pair"],
    uniforms: Float[Tensor, " pair"],
    temperature: float = 1.0,
    flip_rate: float = 0.0,
) -> Bool[Tensor, " pair"]:
    """Simulate a rater who chooses between the two texts of each pair; True if the first one wins.

    1. Divide the gap, the utility of the first text minus that of the second, by the temperature.
    2. Its sigmoid is the probability that the rater prefers the first text.
    3. With probability `flip_rate` the label is flipped; compute the probability that the *label*
       is True.
    4. The label is True if the uniform number is below this probability.

    Raises ValueError unless temperature > 0, and flip_rate and uniforms are in [0, 1].

    P(first) = (1 - e) sigmoid(d / T) + e sigmoid(-d / T)   (Bradley and Terry 1952)
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be greater than 0, got {temperature}.")
    check_same_shape(gaps=gaps, uniforms=uniforms)
    if not 0 <= flip_rate <= 1 or ((uniforms < 0) | (uniforms > 1)).any():
        raise ValueError(f"{flip_rate=} and uniforms must be between 0 and 1.")
    prefers = (at_least_float32(gaps) / temperature).sigmoid()
    label = (1 - flip_rate) * prefers + flip_rate * (1 - prefers)
    return uniforms < label


def bradley_terry_loss(
    chosen: Float[Tensor, " batch"],
    rejected: Float[Tensor, " batch"],
    margin: float | Float[Tensor, " batch"] = 0.0,
    center_coef: float = 0.0,
) -> Float[Tensor, ""]:
    """Compute the loss that trains a reward model to score chosen above rejected (to be minimized).

    1. Take the difference of the two rewards, and subtract the margin.
    2. Take minus its log-sigmoid, which is the surprise at the preference.
    3. Add `center_coef` times the squared sum of the two rewards. This keeps their mean near 0,
       which preferences alone do not determine.
    4. Average over the pairs.

    Raises ValueError if center_coef is negative or there is no pair.

    loss = mean [-log sigmoid(r_chosen - r_rejected - margin) + c (r_chosen + r_rejected)^2]
    (Bradley and Terry 1952; Ouyang et al. 2022, arXiv 2203.02155, equation 1; margin: Touvron et
    al. 2023, arXiv 2307.09288, equation 2; centering: Eisenstein et al. 2023, arXiv 2312.09244)
    """
    if center_coef < 0:
        raise ValueError(f"center_coef must be at least 0, got {center_coef}.")
    check_not_empty(chosen)
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
    """Mark the positions from the first difference of a pair to the end of its longer response."""
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
    """Average the Bradley-Terry loss over the marked positions of each pair, then over pairs.

    loss = mean_i mean_t -log sigmoid(r_chosen,it - r_rejected,it)
    """
    check_same_shape(chosen=chosen, rejected=rejected, mask=mask)
    chosen, rejected = zero_masked(chosen, mask), zero_masked(rejected, mask)
    loss = -logsigmoid(at_least_float32(chosen) - at_least_float32(rejected))
    return aggregate(loss, mask, "sequence_mean")


def preference_accuracy(
    chosen: Float[Tensor, " batch"], rejected: Float[Tensor, " batch"]
) -> Float[Tensor, ""]:
    """Compute the fraction of pairs whose chosen response has the higher reward; a tie is half."""
    check_not_empty(chosen)
    check_same_shape(chosen=chosen, rejected=rejected)
    difference = at_least_float32(chosen) - at_least_float32(rejected)
    won = (difference.sign() + 1) / 2  # the sign of nan is 0
    return won.masked_fill(chosen.isnan() | rejected.isnan(), torch.nan).mean()


class Calibration(NamedTuple):
    """Predictions of a preference model compared with outcomes, bin by bin from low to high."""

    predicted: Float[Tensor, " bin"]  # mean predicted probability that the first text wins
    observed: Float[Tensor, " bin"]  # fraction of the pairs in which it won
    count: Int[Tensor, " bin"]  # number of pairs


def calibration_bins(
    gaps: Float[Tensor, " pair"], outcomes: Bool[Tensor, " pair"], n_bins: int
) -> Calibration:
    """Compare a judge's probabilities with the fraction of pairs that the first text wins.

    1. The judge's probability is the sigmoid of its gap, the score of the first text minus that of
       the second.
    2. Sort the pairs by their gaps, and cut them into bins of equal counts, or of counts that
       differ by 1.
    3. In each bin take the mean probability, the fraction of pairs that the first text won, and the
       count, as `Calibration(predicted, observed, count)`.

    Which text is the first must not depend on which one won. In float64. Raises ValueError unless
    there are from 1 to as many bins as pairs.
    """
    check_same_shape(gaps=gaps, outcomes=outcomes)
    if not 1 <= n_bins <= len(gaps):
        raise ValueError(f"n_bins must be between 1 and {len(gaps)} (the pairs), got {n_bins}.")
    ordered, order = gaps.detach().cpu().double().sort(stable=True)
    predicted, won = ordered.sigmoid(), outcomes.cpu().double()[order]
    bins = list(zip(predicted.tensor_split(n_bins), won.tensor_split(n_bins), strict=True))
    return Calibration(
        predicted=torch.stack([p.mean() for p, _ in bins]),
        observed=torch.stack([outcome.mean() for _, outcome in bins]),
        count=torch.tensor([len(p) for p, _ in bins]),
    )


def auc(scores: Float[Tensor, "*site n"], labels: Bool[Tensor, " n"]) -> Float[Tensor, "*site"]:
    """Compute the probability that a positive example scores above a negative one (ROC AUC).

    In float64; nan for scores with a nan, and without a positive or a negative example.

    AUC = P(s+ > s-) + P(s+ = s-) / 2   (Mann and Whitney 1947)
    """
    positive, negative = scores[..., labels.bool()], scores[..., ~labels.bool()]
    above, below = positive[..., :, None], negative[..., None, :]
    wins = (above > below).double() + 0.5 * (above == below).double()
    return wins.mean((-2, -1)).masked_fill(scores.isnan().any(-1), torch.nan)


def check_not_empty(batch: Tensor, what: str = "pair") -> None:
    """Raise ValueError for an empty batch, whose mean would be nan, and for numbers per token."""
    if batch.ndim != 1:
        raise ValueError(
            f"Each {what} must have one number, got shape {tuple(batch.shape)}. Sum or average its "
            "tokens first, such as with sequence_sum."
        )
    if not len(batch):
        raise ValueError(f"A mean needs at least one {what}, got none.")
