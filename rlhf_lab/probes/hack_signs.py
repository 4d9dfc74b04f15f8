"""Signs of reward hacking: words that a policy took up, by its logits and by its texts alone."""

import math
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.functional import Interval, bootstrap_means, word_log_odds
from rlhf_lab.probes.probe import RESAMPLES

TOP_WORDS = 20
TWICE = math.log(2)  # an alarm is for words more than twice as likely as before
ALARM_LEVEL = 0.05  # fraction of records with a false alarm, if estimates are normal


class Promoted(NamedTuple):
    """The tokens that won most probability.

    Args:
        ids: from the most promoted on.
        mean_won, mean_before: means over all states of the policy's probability minus the
            reference's, and of the reference's.
        interval: of the mean won, over texts.
        z: standard errors by which the log of the ratio of probabilities lies above log 2.
    """

    ids: list[int]
    mean_won: Float[Tensor, " word"]
    mean_before: Float[Tensor, " word"]
    interval: Interval
    z: Float[Tensor, " word"]


class TakenUp(NamedTuple):
    """The words that are most over-represented in texts beside those of the reference.

    Args:
        ids: from the largest z on.
        log_odds: see `word_log_odds`.
        sd: the standard deviation of the log odds.
    """

    ids: list[int]
    log_odds: Float[Tensor, " word"]
    sd: Float[Tensor, " word"]


def most_promoted(
    won: Float[Tensor, "text d_vocab"],
    before: Float[Tensor, "text d_vocab"],
    states: Int[Tensor, " text"],
) -> Promoted:
    """Rank tokens by the probability they gained, with the z of a ratio above 2.

    The ratio is mean pi(v) / mean ref(v) over the same states; the error of its log is computed
    from the residuals of the texts (Cochran 1977, "Sampling Techniques", chapter 6).

    Args:
        won, before: means over the states of each text.
        states: number of states of each text.
    """
    weight = states.double()[:, None]
    share = weight / weight.sum().clamp(min=1)
    ids = (share * won).sum(0).topk(min(TOP_WORDS, won.shape[1])).indices
    won, before = won[:, ids].double(), before[:, ids].double()
    mean_won, mean_before = (share * won).sum(0), (share * before).sum(0)
    interval = bootstrap_means(
        won * weight, weight.expand_as(won), statistic=torch.div, resamples=RESAMPLES
    )
    n, now = len(won), mean_won + mean_before
    ratio = now / mean_before.clamp(min=1e-300)
    residual = share * (won + before - ratio * before)
    error = (residual.square().sum(0) * n / max(1, n - 1)).sqrt() / now.clamp(min=1e-300)
    z = (ratio.clamp(min=1e-300).log() - TWICE) / error.clamp(min=1e-300)
    return Promoted(ids.tolist(), mean_won, mean_before, interval, z)


def most_taken_up(
    counts: Int[Tensor, " d_vocab"], reference_counts: Int[Tensor, " d_vocab"]
) -> TakenUp:
    """Rank tokens by the z of their log odds; see `word_log_odds`."""
    found = word_log_odds(counts, reference_counts)
    ids = found.z.topk(min(TOP_WORDS, len(counts))).indices
    return TakenUp(ids.tolist(), found.log_odds[ids], found.sd[ids])


def alarm_z(d_vocab: int) -> float:
    """How many standard errors an alarm takes, with one chance for each token (Bonferroni)."""
    return NormalDist().inv_cdf(1 - ALARM_LEVEL / d_vocab)


def promoted_alarms(found: Promoted, states: int, d_vocab: int) -> list[int]:
    """Tokens that are surely twice as likely, and that these states are to have one more of."""
    rows = zip(found.ids, found.z.tolist(), found.mean_won.tolist(), strict=True)
    return [token for token, z, won in rows if z > alarm_z(d_vocab) and won * states > 1]


def taken_up_alarms(found: TakenUp, d_vocab: int) -> list[int]:
    """Tokens whose odds in the texts are surely twice as large."""
    rows = zip(found.ids, found.log_odds.tolist(), found.sd.tolist(), strict=True)
    return [token for token, x, sd in rows if x - alarm_z(d_vocab) * sd > TWICE]


def promoted_table(found: Promoted, words: list[str]) -> list[dict[str, Any]]:
    """A row per token, from the most promoted on."""
    low, high = (
        [None] * len(words) if end is None else end.tolist()
        for end in (found.interval.low, found.interval.high)
    )
    columns = (words, found.ids, found.mean_won.tolist(), low, high, found.mean_before.tolist())
    return [
        {
            "token": word,
            "id": token,
            "won": round(won, 8),
            "low": None if least is None else round(least, 8),
            "high": None if most is None else round(most, 8),
            "reference": round(before, 8),
        }
        for word, token, won, least, most, before in zip(*columns, strict=True)
    ]


def taken_up_table(
    found: TakenUp, words: list[str], counts: Int[Tensor, "side d_vocab"]
) -> list[dict[str, Any]]:
    """A row per token, from the largest z on; the interval is 95 %, of independent tokens."""
    z = NormalDist().inv_cdf(0.975)
    columns = words, found.ids, found.log_odds.tolist(), found.sd.tolist()
    return [
        {
            "token": word,
            "id": token,
            "count": int(counts[0, token]),
            "reference_count": int(counts[1, token]),
            "log_odds": round(x, 6),
            "low": round(x - z * sd, 6),
            "high": round(x + z * sd, 6),
        }
        for word, token, x, sd in zip(*columns, strict=True)
    ]
