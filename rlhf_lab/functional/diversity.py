"""Diversity of a batch of texts: distinct and repeated n-grams, overlap, and words by log odds."""

import math
from collections import Counter
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.functional.masks import check_mask, check_same_shape

__all__ = ["WordLogOdds", "distinct_n", "ngram_overlap", "repeated_n", "word_log_odds"]


class WordLogOdds(NamedTuple):
    """How much likelier each token of the vocabulary is in one set of texts than in another.

    Args:
        log_odds: log odds of the token, smoothed, less those in the other set; 0 for a token of
            neither, and for the only one.
        sd: its standard deviation, of tokens drawn independently; 0 likewise.
        z: the first by the second; 0 likewise.
    """

    log_odds: Float[Tensor, " d_vocab"]
    sd: Float[Tensor, " d_vocab"]
    z: Float[Tensor, " d_vocab"]


def distinct_n(
    tokens: Int[Tensor, "batch seq"], n: int, mask: Bool[Tensor, "batch seq"] | None = None
) -> float:
    """Give the number of different n-grams by the number of all n-grams, of all texts together.

    1. Slide a window of n tokens over each text; it never reaches from one text into the next.
    2. Leave out windows with a masked token.
    3. Count the different ones, and divide by the number of all.

    It falls with the number of texts, so that only batches of one size compare. nan where no text
    has n tokens. Raises ValueError for n below 1, or a mask of another shape.

    distinct_n = |set of n-grams| / |n-grams|    (Li et al. 2016, arXiv 1510.03055)
    """
    found = [ngram for ngrams in _ngrams(tokens, n, mask) for ngram in ngrams]
    return len(set(found)) / len(found) if found else math.nan


def repeated_n(
    tokens: Int[Tensor, "batch seq"], n: int, mask: Bool[Tensor, "batch seq"] | None = None
) -> Float[Tensor, " batch"]:
    """Give the share of each text's n-grams that it has had before: 0 without repetition.

    nan for a text of fewer than n tokens. Raises ValueError for n below 1, or a mask of another
    shape.

    rep_n = 1 - |set of a text's n-grams| / |its n-grams|    (Welleck et al. 2019, arXiv 1908.04319)
    """
    found = _ngrams(tokens, n, mask)
    shares = [1 - len(set(ngrams)) / len(ngrams) if ngrams else math.nan for ngrams in found]
    return torch.tensor(shares, dtype=torch.float64)


def ngram_overlap(
    tokens: Int[Tensor, "batch seq"], n: int, mask: Bool[Tensor, "batch seq"] | None = None
) -> Float[Tensor, " batch"]:
    """Give the share of each text's different n-grams that another text has, as a mean over others.

    1 for a batch of one text again and again, and 0 where no two texts share an n-gram; unlike
    `distinct_n` it does not depend on the number of texts. nan for a text of fewer than n tokens,
    and for one that is alone. Raises ValueError for n below 1, or a mask of another shape.

    o_i = 1/(B - 1) sum_{j != i} |S_i and S_j| / |S_i|, with S_i the set of n-grams of text i
    (pairwise, as in Self-BLEU: Zhu et al. 2018, arXiv 1802.01886)
    """
    found = [set(ngrams) for ngrams in _ngrams(tokens, n, mask)]
    holders = Counter(ngram for ngrams in found for ngram in ngrams)
    others = len(found) - 1
    shares = [
        sum(holders[ngram] - 1 for ngram in ngrams) / (others * len(ngrams))
        if ngrams and others
        else math.nan
        for ngrams in found
    ]
    return torch.tensor(shares, dtype=torch.float64)


def word_log_odds(
    counts: Int[Tensor, " d_vocab"],
    other_counts: Int[Tensor, " d_vocab"],
    prior_tokens: float | int = 100,
) -> WordLogOdds:
    """Compare how often each token comes in two sets of texts, smoothed by what both have.

    1. Spread `prior_tokens` pseudo-tokens over the vocabulary as both sets together have them, and
       add them to each set: a token that is rare in both stays near 0.
    2. Take the token's log odds against all other tokens in each set, and subtract.
    3. Divide by the standard deviation of that difference, of tokens drawn independently.

    Tokens of one text are not independent: where a text repeats a token, z is too large. Raises
    ValueError for counts of unequal shapes, or a prior that is not above 0.

    a_v = prior_tokens (y_v + y'_v) / (n + n')
    log_odds = log (y_v + a_v)/(n + a - y_v - a_v) - log (y'_v + a_v)/(n' + a - y'_v - a_v)
    z = log_odds / sqrt(1 / (y_v + a_v) + 1 / (y'_v + a_v))
    (Monroe, Colaresi and Quinn 2008, "Fightin' Words", Political Analysis 16: 372-403)
    """
    check_same_shape(counts=counts, other_counts=other_counts)
    if not prior_tokens > 0:
        raise ValueError(f"prior_tokens is {prior_tokens}; give a number above 0.")
    both = torch.stack([counts.cpu(), other_counts.cpu()]).double()
    together = both.sum(0)
    smooth = both + prior_tokens * together / together.sum().clamp(min=1)
    rest = smooth.sum(1, keepdim=True) - smooth
    there = (together > 0) & (together < together.sum())  # else no odds are defined
    odds = torch.where(there, smooth, 1.0).log() - torch.where(there, rest, 1.0).log()
    log_odds = odds[0] - odds[1]
    sd = torch.where(there, 1 / smooth, 0.0).sum(0).sqrt()
    return WordLogOdds(log_odds, sd, torch.where(there, log_odds / sd, 0.0))


def _ngrams(
    tokens: Int[Tensor, "batch seq"], n: int, mask: Bool[Tensor, "batch seq"] | None
) -> list[list[tuple[int, ...]]]:
    """The n-grams of each text whose tokens are all real, one after another."""
    if n < 1:
        raise ValueError(f"n is {n}; count n-grams of at least 1 token.")
    check_mask(tokens, mask)
    check_same_shape(tokens=tokens, mask=mask)
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    rows = zip(tokens.tolist(), real.tolist(), strict=True)
    return [
        [tuple(row[i : i + n]) for i in range(len(row) - n + 1) if all(is_real[i : i + n])]
        for row, is_real in rows
    ]
