"""Samples, entropy and figures of policies on the state graph, to hold exact numbers against."""

from itertools import product

import numpy as np

from rlhf_lab.organism import (
    FrontierPoint,
    Grammar,
    GraphPolicy,
    Reward,
    lexicon,
    optimal_policy,
    true_reward,
)


def entropy(policy: GraphPolicy) -> float:
    """Give the entropy of a review, in nats."""
    pairs = zip(policy.occupancy()[:-1], policy.probability, strict=True)
    return -sum(float((o[:, None] * p * np.log(np.where(p > 0, p, 1))).sum()) for o, p in pairs)


def optimum_by_programming(reference: GraphPolicy, proxy: Reward, beta: float) -> FrontierPoint:
    """Measure the policy that soft dynamic programming over states finds."""
    features, policy = reference.graph.final_features(), optimal_policy(reference, proxy, beta)
    return FrontierPoint(
        beta=beta,
        proxy=policy.mean(proxy.score(features)),
        true_reward=policy.mean(true_reward.score(features)),
        kl_per_sequence=float(policy.kl_by_position(reference).sum()),
        popcorn=policy.mean(features.popcorn.astype(float)),
    )


def positive_by_enumeration(words: list[str], grammar: Grammar) -> tuple[np.ndarray, np.ndarray]:
    """P(positive | prefix) and P(prefix) of every prefix, by a sum over all latents."""
    hidden = list(product((1, -1), range(3), range(3), *[(1, -1)] * grammar.n_clauses))
    weight = np.array(
        [np.prod([_equal(p, y, lexicon.P_POLARITY) for p in ps]) / 18 for y, _, _, *ps in hidden]
    )
    positive = np.array([y > 0 for y, *_ in hidden])
    fraction, total = [], []
    for t in range(len(words)):
        weight = weight * np.array([_word_probability(t, words, row, grammar) for row in hidden])
        total.append(weight.sum())
        fraction.append(weight[positive].sum() / weight.sum())
    return np.array(fraction), np.array(total)


def _equal(sign: int, other: int, probability: float) -> float:
    return probability if sign == other else 1 - probability


def _word_probability(t: int, words: list[str], row: tuple, grammar: Grammar) -> float:
    """P(word t | latents, words before): sentiment y, intensity i, style r, clause polarities."""
    (y, i, r, *polarity), word = row, words[t]
    name, k, choices = grammar.slots[t]
    tier = lambda of: lexicon.P_TIER if of == i else (1 - lexicon.P_TIER) / 2
    if name == "OPEN":
        return (lexicon.STYLE_OF_OPENER[word] == r) / len(lexicon.OPENERS[r])
    if name == "COP":
        return _equal(word == "wasn't", True, lexicon.P_NEGATION)
    if name == "ADV":
        is_typical = word in lexicon.ADVERBS[r]
        return lexicon.P_TYPICAL_ADVERB / 2 if is_typical else (1 - lexicon.P_TYPICAL_ADVERB) / 4
    if name == "ADJ":
        sign, strength = lexicon.SENSE_OF_ADJECTIVE[word]
        negation = -1 if words[t - 2] == "wasn't" else 1
        return (sign == negation * polarity[k]) * tier(strength) / 4
    if name == "CONN":
        return _equal(word == "and", polarity[k] == polarity[k - 1], 1 - lexicon.P_FLIP)
    if name == "VERB":
        sign, strength = lexicon.SENSE_OF_VERB[word]
        return _equal(sign, y, lexicon.P_VERDICT) * tier(strength)
    if name == "TAG":
        return lexicon.P_TAGS[lexicon.TAGS.index(word)]
    return 1 / len(choices)
