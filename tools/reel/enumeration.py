"""P(positive | prefix) of a review by enumeration of its latents, without the exact programme."""

from itertools import product

import numpy as np
from jaxtyping import Float

from rlhf_lab.organism.grammar import Grammar
from rlhf_lab.organism.lexicon import (
    ADVERBS,
    OPENERS,
    P_FLIP,
    P_NEGATION,
    P_OWN_ADVERB,
    P_POLARITY,
    P_TAGS,
    P_TIER,
    P_VERDICT,
    SENSE_OF_ADJECTIVE,
    SENSE_OF_VERB,
    STYLE_OF_OPENER,
    TAGS,
)


def positive_by_enumeration(
    words: list[str], grammar: Grammar
) -> tuple[Float[np.ndarray, " seq"], Float[np.ndarray, " seq"]]:
    """Give P(y=+ | prefix) and P(prefix) for every prefix, without any state.

    1. List all combinations of sentiment, intensity, style and clause polarities, with their prior.
    2. Multiply each by the probability of every word given that combination.
    3. Compare the weight of y=+ with the whole.
    """
    hidden = product((1, -1), range(3), range(3), *[(1, -1)] * grammar.n_clauses)
    rows = [(y, i, r, polarity) for y, i, r, *polarity in hidden]
    weight = np.array(
        [np.prod([_equal(p, y, P_POLARITY) for p in polarity]) / 18 for y, _, _, polarity in rows]
    )
    positive = np.array([y > 0 for y, *_ in rows])
    share, total = [], []
    for t, word in enumerate(words):
        likelihood = [_word_probability(word, t, words, row, grammar) for row in rows]
        weight = weight * np.array(likelihood)
        total.append(weight.sum())
        share.append(weight[positive].sum() / weight.sum())
    return np.array(share), np.array(total)


def _equal(sign: int, truth: int, probability: float) -> float:
    return probability if sign == truth else 1 - probability


def _word_probability(
    word: str, t: int, words: list[str], row: tuple[int, int, int, list[int]], grammar: Grammar
) -> float:
    """Give P(word at position t | latents, words before)."""
    y, i, r, polarity = row
    name, k, choices = grammar.slots[t]
    if name == "OPEN":
        return (STYLE_OF_OPENER[word] == r) / len(OPENERS[r])
    if name == "COP":
        return P_NEGATION if word == "wasn't" else 1 - P_NEGATION
    if name == "ADV":
        return P_OWN_ADVERB / 2 if word in ADVERBS[r] else (1 - P_OWN_ADVERB) / 4
    if name == "ADJ":
        sign, tier = SENSE_OF_ADJECTIVE[word]
        negation = -1 if words[t - 2] == "wasn't" else 1
        graded = P_TIER if tier == i else (1 - P_TIER) / 2
        return (sign == negation * polarity[k]) * graded / 4
    if name == "CONN":
        expected = "and" if polarity[k] == polarity[k - 1] else "but"
        return 1 - P_FLIP if word == expected else P_FLIP
    if name == "VERB":
        sign, tier = SENSE_OF_VERB[word]
        return _equal(sign, y, P_VERDICT) * (P_TIER if tier == i else (1 - P_TIER) / 2)
    if name == "TAG":
        return P_TAGS[TAGS.index(word)]
    return 1 / len(choices)
