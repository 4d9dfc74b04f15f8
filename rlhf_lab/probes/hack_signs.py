"""Words that a policy took up, by its logits and by its texts, with alarms."""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.functional import bootstrap_means, word_log_odds
from rlhf_lab.probes.probe import RESAMPLES, decimals

TOP_WORDS = 20
TWICE = math.log(2)  # an alarm is for words more than twice as likely as before
ALARM_LEVEL = 0.05  # fraction of records with a false alarm, if estimates are normal

# a row per token, and the tokens of an alarm
WordsAndAlarms = tuple[list[dict[str, Any]], list[str]]


def promoted_words(
    won: Float[Tensor, "text d_vocab"],
    before: Float[Tensor, "text d_vocab"],
    states: Int[Tensor, " text"],
    spell: Callable[[list[int]], str],
) -> WordsAndAlarms:
    """Return the tokens that gained most probability, with alarms for ratios above 2.

    The ratio is mean pi(v) / mean ref(v) over the same states; the error of its log is computed
    from the residuals of the texts (Cochran 1977, "Sampling Techniques", chapter 6). An alarm also
    requires that these states are expected to have one more of the token.

    Args:
        won, before: means over the states of each text, of the policy's probability minus the
            reference's, and of the reference's.
        states: number of states of each text.
    """
    limit, weight = alarm_z(won.shape[1]), states.double()[:, None]
    share = weight / weight.sum().clamp(min=1)
    ids = (share * won).sum(0).topk(min(TOP_WORDS, won.shape[1])).indices
    won, before = won[:, ids].double(), before[:, ids].double()
    mean_won, mean_before = (share * won).sum(0), (share * before).sum(0)
    ends = bootstrap_means(
        won * weight, weight.expand_as(won), statistic=torch.div, resamples=RESAMPLES
    )
    n, now = len(won), mean_won + mean_before
    ratio = now / mean_before.clamp(min=1e-300)
    residual = share * (won + before - ratio * before)
    error = (residual.square().sum(0) * n / max(1, n - 1)).sqrt() / now.clamp(min=1e-300)
    z = (ratio.clamp(min=1e-300).log() - TWICE) / error.clamp(min=1e-300)
    columns = {"won": mean_won, "low": ends.low, "high": ends.high, "reference": mean_before}
    is_alarm = (z > limit) & (mean_won * states.sum() > 1)
    return _rows(ids, spell, columns, 8, is_alarm)


def taken_up_words(
    counts: Int[Tensor, "side d_vocab"], spell: Callable[[list[int]], str]
) -> WordsAndAlarms:
    """Return the tokens over-represented in texts compared with the reference's, with alarms.

    Intervals are of independent tokens, see `word_log_odds`.

    Args:
        counts: of the policy's and the reference's texts.
    """
    odds = word_log_odds(*counts)
    ids = odds.z.topk(min(TOP_WORDS, counts.shape[1])).indices
    log_odds, sd = odds.log_odds[ids], odds.sd[ids]
    reach = NormalDist().inv_cdf(0.975) * sd
    columns = {"count": counts[0, ids], "reference_count": counts[1, ids], "log_odds": log_odds}
    columns |= {"low": log_odds - reach, "high": log_odds + reach}
    is_alarm = log_odds - alarm_z(counts.shape[1]) * sd > TWICE
    return _rows(ids, spell, columns, 6, is_alarm)


def alarm_z(d_vocab: int) -> float:
    """Return the number of standard errors of an alarm, for all tokens together (Bonferroni)."""
    return NormalDist().inv_cdf(1 - ALARM_LEVEL / d_vocab)


def _rows(
    ids: Int[Tensor, " word"],
    spell: Callable[[list[int]], str],
    columns: dict[str, Tensor | None],
    digits: int,
    is_alarm: Bool[Tensor, " word"],
) -> WordsAndAlarms:
    rows = [{"token": spell([token]), "id": token} for token in ids.tolist()]
    for name, column in columns.items():
        numbers = [None] * len(rows) if column is None else decimals(column, digits)
        for row, number in zip(rows, numbers, strict=True):
            row[name] = number
    return rows, [row["token"] for row, x in zip(rows, is_alarm, strict=True) if x]
