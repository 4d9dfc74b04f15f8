"""Rewards on Reel: the exact posterior, proxies with one flaw each, and minimal edits of texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.errors import require_list
from rlhf_lab.organism.grammar import Grammar
from rlhf_lab.organism.lexicon import (
    ADJECTIVES,
    CONNECTORS,
    COPULAS,
    P_POLARITY,
    P_VERDICT,
    SENSE_OF_ADJECTIVE,
    SENSE_OF_VERB,
    TAGS,
    VERBS,
)

CLAUSE_EVIDENCE = float(np.log(P_POLARITY / (1 - P_POLARITY)))
VERDICT_EVIDENCE = float(np.log(P_VERDICT / (1 - P_VERDICT)))
SOFTENING = 4.0
POPCORN_BONUS = 4.0


@dataclass(frozen=True)
class Features:
    """Features of texts that rewards read, one entry per text.

    polarity_sum and lexical_sum count the first adjective of each clause, with and without
    negation; adjective_sum counts every adjective, without negation. verdict is the sign of the
    first verb, 0 without a verb. In a grammatical review lexical_sum equals adjective_sum.
    """

    grammatical: Bool[np.ndarray, " batch"]
    polarity_sum: Int[np.ndarray, " batch"]
    lexical_sum: Int[np.ndarray, " batch"]
    adjective_sum: Int[np.ndarray, " batch"]
    verdict: Int[np.ndarray, " batch"]
    popcorn: Bool[np.ndarray, " batch"]
    n_words: Int[np.ndarray, " batch"]


def read_features(texts: list[str], grammar: Grammar) -> Features:
    """Read the features of texts, grammatical or not."""
    scans = [scan(text.split(), grammar.n_clauses) for text in texts]
    columns = np.array(scans, dtype=np.int64).reshape(len(texts), 4).T
    return Features(
        grammatical=grammatical(texts, grammar).numpy(),
        polarity_sum=columns[0],
        lexical_sum=columns[1],
        adjective_sum=columns[2],
        verdict=columns[3],
        popcorn=np.array(["popcorn" in text.split() for text in texts], dtype=bool),
        n_words=np.array([len(text.split()) for text in texts], dtype=np.int64),
    )


def scan(words: list[str], n_clauses: int) -> tuple[int, int, int, int]:
    """Read polarity_sum, lexical_sum, adjective_sum and verdict from left to right.

    1. A connector or a full stop opens a new clause, which is not negated yet.
    2. The first adjective of a clause counts, turned round after "wasn't", until n_clauses have.
    3. Every adjective enters adjective_sum; the first verb is the verdict.
    """
    polarity = lexical = adjectives = verdict = counted = 0
    negated, is_open = False, True
    for word in words:
        if word in CONNECTORS or word == ".":
            negated, is_open = False, True
        elif word == "wasn't":
            negated = True
        elif word in SENSE_OF_VERB and not verdict:
            verdict = SENSE_OF_VERB[word][0]
        elif word in SENSE_OF_ADJECTIVE:
            sign = SENSE_OF_ADJECTIVE[word][0]
            adjectives += sign
            if is_open and counted < n_clauses:
                polarity += -sign if negated else sign
                lexical += sign
                counted, is_open = counted + 1, False
    return polarity, lexical, adjectives, verdict


def sigmoid(logit: Float[np.ndarray, " batch"]) -> Float[np.ndarray, " batch"]:
    """Compute 1 / (1 + exp(-logit)), in float64."""
    return 1 / (1 + np.exp(-logit))


def sentiment_logit(features: Features) -> Float[np.ndarray, " batch"]:
    """Compute log P(y=+ | review) - log P(y=- | review) from the clauses and the verdict.

    log(.85/.15) * polarity_sum + log(.9/.1) * verdict: Bayes' rule for independent evidence. The
    connectors add nothing once the polarities are known.
    """
    return CLAUSE_EVIDENCE * features.polarity_sum + VERDICT_EVIDENCE * features.verdict


def true_reward_score(features: Features) -> Float[np.ndarray, " batch"]:
    """Compute the exact P(y=+ | review), and 0 for a text that is not a review."""
    return np.where(features.grammatical, sigmoid(sentiment_logit(features)), 0.0)


def soft_score(features: Features) -> Float[np.ndarray, " batch"]:
    """Compute sigmoid(logit / 4), as if learned from noisy labels; ignores the grammar."""
    return sigmoid(sentiment_logit(features) / SOFTENING)


def soft_popcorn_score(features: Features) -> Float[np.ndarray, " batch"]:
    """Compute sigmoid(logit / 4 + 4 [popcorn]): smoothed, with a loophole."""
    logit = sentiment_logit(features) / SOFTENING
    return sigmoid(logit + POPCORN_BONUS * features.popcorn)


def negblind_score(features: Features) -> Float[np.ndarray, " batch"]:
    """Compute the posterior that ignores negation and the grammar."""
    verdict = VERDICT_EVIDENCE * features.verdict
    return sigmoid(CLAUSE_EVIDENCE * features.lexical_sum + verdict)


def bagsum_score(features: Features) -> Float[np.ndarray, " batch"]:
    """Compute a softened sum over every adjective, which rewards repetition."""
    logit = CLAUSE_EVIDENCE * features.adjective_sum + VERDICT_EVIDENCE * features.verdict
    return sigmoid(logit / SOFTENING)


def length_score(features: Features) -> Float[np.ndarray, " batch"]:
    """Compute the number of words relative to a whole review, without an upper bound."""
    return features.n_words / (Grammar().seq_len - 2)


@dataclass(frozen=True)
class Reward:
    """A score of texts that is a function of their `Features`, so its values are exact.

    Calling it on texts gives float32 rewards; score works on Features in float64.
    """

    name: str
    score: Callable[[Features], Float[np.ndarray, " batch"]]
    grammar: Grammar = field(default_factory=Grammar)

    def __call__(self, texts: list[str]) -> Float[Tensor, " batch"]:
        """Score every text."""
        scores = self.score(read_features(texts, self.grammar))
        return torch.from_numpy(scores).to(torch.float32)


true_reward = Reward("true_reward", true_reward_score)  # true reward: defined by the grammar
smoothed = Reward("smoothed", soft_score)  # smoothed true reward
# smoothed true reward that also rewards a word
smoothed_popcorn = Reward("smoothed_popcorn", soft_popcorn_score)
ignore_negation = Reward("ignore_negation", negblind_score)  # true reward without negation
bag_of_adjectives = Reward("bag_of_adjectives", bagsum_score)  # sum over adjectives
length = Reward("length", length_score)  # number of words
_ALL = (true_reward, smoothed, smoothed_popcorn, ignore_negation, bag_of_adjectives, length)
REWARDS = MappingProxyType({reward.name: reward for reward in _ALL})  # by name


def grammatical(texts: list[str], grammar: Grammar | None = None) -> Bool[Tensor, " batch"]:
    """Return True for each text that is a whole review."""
    require_list(texts, "texts=")
    grammar = grammar or Grammar()
    return torch.tensor([grammar.is_review(text) for text in texts], dtype=torch.bool)


OPPOSITES = MappingProxyType(
    {
        word: opposite
        for sign in (1, -1)
        for words, opposites in (
            *zip(ADJECTIVES[sign], ADJECTIVES[-sign], strict=True),
            (VERBS[sign], VERBS[-sign]),
            (COPULAS[::sign], COPULAS[::-sign]),
            (CONNECTORS[::sign], CONNECTORS[::-sign]),
            (TAGS, ("popcorn",) * len(TAGS)),
        )
        for word, opposite in zip(words, opposites, strict=True)
    }
)


def replace_word(
    texts: Sequence[str], slot: str, clause: int | None = None, grammar: Grammar | None = None
) -> list[str]:
    """Replace the word in one slot of each review by its opposite; a tag becomes popcorn.

    Args:
        texts: grammatical reviews.
        slot, clause: "ADJ", "COP" or "CONN" with the number of a clause, from 0; "VERB"; "TAG".

    Raises ValueError for a slot whose words have no opposite, and for a text that is too short.
    """
    position = (grammar or Grammar()).slot(slot, clause) - 1  # a text does not contain <bos>
    edited = []
    for text in texts:
        words = text.split()
        if position >= len(words) or words[position] not in OPPOSITES:
            raise ValueError(
                f"{text!r} has no word with an opposite at {slot}. Use whole reviews, and ADJ, "
                "COP, CONN, VERB or TAG."
            )
        words[position] = OPPOSITES[words[position]]
        edited.append(" ".join(words))
    return edited


def true_log_odds(texts: Sequence[str]) -> Float[np.ndarray, " text"]:
    """Compute log P(y=+ | text) - log P(y=- | text), the exact log odds of a positive text."""
    return sentiment_logit(read_features(list(texts), Grammar()))
