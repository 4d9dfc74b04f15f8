"""Judges of preference pairs compared with the true rewards: order, probability and slope."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.functional import bradley_terry_loss
from rlhf_lab.organism.rewards import replace_word, true_log_odds

EDITS = {  # slot and clause of the word that is replaced
    f"{word} {clause + 1}": (slot, clause)
    for word, slot in (("adjective", "ADJ"), ("copula", "COP"))
    for clause in range(3)
} | {"verb": ("VERB", None), "connector": ("CONN", 2), "tag to popcorn": ("TAG", None)}


class Judgement(NamedTuple):
    """The quality of a judge on pairs with known true gaps."""

    accuracy: float  # fraction of pairs in which it agrees with the rater; a tie counts half
    as_truth: float  # fraction that it orders as the true rewards do, without true ties
    error: float  # mean distance between its probability that the first text wins and the true one
    slope: float  # of its gaps on the true gaps, by least squares through 0; 1 if calibrated
    nll: float  # minus its mean log-probability of the rater's choices, in nats
    best_nll: float  # the same for the true rewards


def judge(
    gaps: Float[Tensor, " pair"],
    true_gaps: Float[Tensor, " pair"],
    first_wins: Bool[Tensor, " pair"],
) -> Judgement:
    """Compare a judge's gaps, score of the first text minus that of the second, with the truth."""
    gaps, true_gaps = gaps.detach().cpu().double(), true_gaps.cpu().double()
    sign, zeros = first_wins.cpu().double() * 2 - 1, torch.zeros_like(gaps)
    return Judgement(
        accuracy=((gaps * sign).sign() + 1).mean().item() / 2,
        as_truth=((gaps * true_gaps)[true_gaps != 0].sign() + 1).mean().item() / 2,
        error=(gaps.sigmoid() - true_gaps.sigmoid()).abs().mean().item(),
        slope=((gaps * true_gaps).sum() / true_gaps.square().sum()).item(),
        nll=bradley_terry_loss(gaps * sign, zeros).item(),
        best_nll=bradley_terry_loss(true_gaps * sign, zeros).item(),
    )


def reading_of(
    score: Callable[[Sequence[str]], Float[Tensor, " text"]], texts: Sequence[str]
) -> dict[str, tuple[Float[Tensor, " text"], float]]:
    """Measure how a judge's scores of Reel reviews change when one word is replaced.

    1. Replace one word of each review by its opposite; see `EDITS`.
    2. Take the change of the score in the direction in which the true log odds change, or its size
       if they do not change.

    Returns, by edit, the change for each review and the exact change of the log odds.
    """
    before, truth = score(texts).double(), torch.from_numpy(true_log_odds(texts))
    changes = {}
    for name, (slot, clause) in EDITS.items():
        edited = replace_word(texts, slot, clause)
        change = score(edited).double().cpu() - before.cpu()
        exact = torch.from_numpy(true_log_odds(edited)) - truth
        along = change * exact.sign() if exact.abs().max() > 1e-9 else change.abs()
        changes[name] = along, exact.abs().mean().item()
    return changes
