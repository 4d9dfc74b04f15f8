"""Diversity of a batch of texts: distinct and repeated n-grams, overlap, and words by log odds."""

import math
from collections import Counter
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.functional.masks import check_same_shape, real_entries


class WordLogOdds(NamedTuple):
    """Log odds of each token in one set of texts relative to another, see `word_log_odds`."""

    log_odds: Float[Tensor, " d_vocab"]
    sd: Float[Tensor, " d_vocab"]  # standard deviation, if tokens are drawn independently
    z: Float[Tensor, " d_vocab"]  # log_odds / sd


def distinct_n(
    tokens: Int[Tensor, "batch seq"], n: int, mask: Bool[Tensor, "batch seq"] | None = None
) -> float:
    """Compute the number of different n-grams divided by the number of all, over all texts.

    1. Slide a window of n tokens over each text. A window never spans two texts.
    2. Leave out windows that contain a masked token.
    3. Count the different windows, and divide by the number of all windows.

    The result falls as the number of texts grows, so only compare batches of the same size. It is
    nan if no text has n tokens. Raises ValueError for n below 1, or a mask of another shape.

    distinct_n = |set of n-grams| / |n-grams|    (Li et al. 2016, arXiv 1510.03055)
    """
    found = [ngram for ngrams in _ngrams(tokens, n, mask) for ngram in ngrams]
    return len(set(found)) / len(found) if found else math.nan


def repeated_n(
    tokens: Int[Tensor, "batch seq"], n: int, mask: Bool[Tensor, "batch seq"] | None = None
) -> Float[Tensor, " batch"]:
    """Compute the fraction of each text's n-grams that occurred before in it; nan without any.

    rep_n = 1 - |set of a text's n-grams| / |its n-grams|    (Welleck et al. 2019, arXiv 1908.04319)
    """
    found = _ngrams(tokens, n, mask)
    repeated = [1 - len(set(ngrams)) / len(ngrams) if ngrams else math.nan for ngrams in found]
    return torch.tensor(repeated, dtype=torch.float64)


def ngram_overlap(
    tokens: Int[Tensor, "batch seq"], n: int, mask: Bool[Tensor, "batch seq"] | None = None
) -> Float[Tensor, " batch"]:
    """Compute the fraction of each text's different n-grams that another text has, averaged.

    nan for a text of fewer than n tokens, and for a single text.

    o_i = 1/(B - 1) sum_{j != i} |S_i and S_j| / |S_i|, with S_i the set of n-grams of text i
    (pairwise, as in Self-BLEU: Zhu et al. 2018, arXiv 1802.01886)
    """
    found = [set(ngrams) for ngrams in _ngrams(tokens, n, mask)]
    counts = Counter(ngram for ngrams in found for ngram in ngrams)
    shared = [sum(counts[ngram] - 1 for ngram in ngrams) for ngrams in found]
    compared = [len(ngrams) * (len(found) - 1) for ngrams in found]
    return torch.tensor(shared, dtype=torch.float64) / torch.tensor(compared)  # 0 / 0 is nan


def word_log_odds(
    counts: Int[Tensor, " d_vocab"],
    other_counts: Int[Tensor, " d_vocab"],
    prior_tokens: float | int = 100,
) -> WordLogOdds:
    """Compare token frequencies of two sets of texts by smoothed log odds.

    `prior_tokens` pseudo-tokens, distributed as both sets together, are added to each set. A token
    of neither set gets 0. z is too large if texts repeat tokens.

    a_v = prior_tokens (y_v + y'_v) / (n + n')
    log_odds = log (y_v + a_v)/(n + a - y_v - a_v) - log (y'_v + a_v)/(n' + a - y'_v - a_v)
    z = log_odds / sqrt(1 / (y_v + a_v) + 1 / (y'_v + a_v))
    (Monroe, Colaresi and Quinn 2008, "Fightin' Words", Political Analysis 16: 372-403)
    """
    check_same_shape(counts=counts, other_counts=other_counts)
    both = torch.stack([counts.cpu(), other_counts.cpu()]).double()
    together = both.sum(0)
    smooth = both + prior_tokens * together / together.sum().clamp(min=1)
    rest = smooth.sum(1, keepdim=True) - smooth
    is_defined = (together > 0) & (together < together.sum())
    odds = torch.where(is_defined, smooth, 1.0).log() - torch.where(is_defined, rest, 1.0).log()
    log_odds = odds[0] - odds[1]
    sd = torch.where(is_defined, 1 / smooth, 0.0).sum(0).sqrt()
    return WordLogOdds(log_odds, sd, torch.where(is_defined, log_odds / sd, 0.0))


def _ngrams(
    tokens: Int[Tensor, "batch seq"], n: int, mask: Bool[Tensor, "batch seq"] | None
) -> list[list[tuple[int, ...]]]:
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}.")
    rows = zip(tokens.tolist(), real_entries(tokens, mask).tolist(), strict=True)
    return [
        [tuple(row[i : i + n]) for i in range(len(row) - n + 1) if all(is_real[i : i + n])]
        for row, is_real in rows
    ]
