"""Beliefs about a review in progress: posteriors of its latents, and of the next word."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rlhf_lab.organism.grammar import Grammar, Slot
from rlhf_lab.organism.lexicon import (
    ADJECTIVES,
    ADVERBS,
    CONNECTORS,
    P_FLIP,
    P_NEGATION,
    P_POLARITY,
    P_TAGS,
    P_TIER,
    P_TYPICAL_ADVERB,
    P_VERDICT,
    SENSE_OF_ADJECTIVE,
    SENSE_OF_VERB,
    STYLE_OF_OPENER,
    TAGS,
    TIERS,
)

SIGNS = (1, -1)


class ReviewState(NamedTuple):
    """All of a prefix that the future and the rewards depend on; None if not known yet.

    last is the polarity of the last clause while a connector may follow; hint is the polarity that
    the connector announces; tiers counts the mild, medium and strong words so far.
    """

    polarity_sum: int = 0
    lexical_sum: int = 0
    tiers: tuple[int, ...] = (0,) * len(TIERS)
    style: int | None = None
    last: int | None = None
    hint: int | None = None
    negated: bool = False
    verdict: int | None = None
    tag: str | None = None


class Branch(NamedTuple):
    """One word that may come next, its probability, and the state after it."""

    word: str
    probability: float
    state: ReviewState


def _likelihood(sign: int, truth: int, probability: float) -> float:
    return probability if sign == truth else 1 - probability


def sentiment_belief(state: ReviewState, with_hint: bool = True) -> dict[int, float]:
    """Compute P(y | prefix), with or without the polarity that a connector announces.

    1. Every polarity read adds log(.85/.15) to the log odds of its sign, the verdict log(.9/.1).
    2. An announced polarity h adds log P(h | y=+) - log P(h | y=-), where
       P(h | y) = sum_p P(p | y) P(h | p): p equals y w.p. .85 and h w.p. .75.
    """
    log_odds = state.polarity_sum * np.log(P_POLARITY / (1 - P_POLARITY))
    if state.verdict is not None:
        log_odds += state.verdict * np.log(P_VERDICT / (1 - P_VERDICT))
    if with_hint and state.hint is not None:
        agree = P_POLARITY * (1 - P_FLIP) + (1 - P_POLARITY) * P_FLIP
        log_odds += state.hint * np.log(agree / (1 - agree))
    positive = float(1 / (1 + np.exp(-log_odds)))
    return {1: positive, -1: 1 - positive}


def intensity_belief(state: ReviewState) -> list[float]:
    """Compute P(i | prefix): proportional to the probability of the tiers read."""
    weight = np.array([(P_TIER / ((1 - P_TIER) / 2)) ** count for count in state.tiers])
    return (weight / weight.sum()).tolist()


def polarity_forecast(state: ReviewState) -> dict[int, float]:
    """Compute P(polarity of the next clause | prefix), with its announcement."""
    belief = sentiment_belief(state, with_hint=False)
    weight = {p: sum(belief[y] * _likelihood(p, y, P_POLARITY) for y in SIGNS) for p in SIGNS}
    if state.hint is not None:
        weight = {p: w * _likelihood(p, state.hint, 1 - P_FLIP) for p, w in weight.items()}
    total = sum(weight.values())
    return {p: w / total for p, w in weight.items()}


def tier_forecast(state: ReviewState) -> list[float]:
    """Compute P(tier of the next graded word | prefix)."""
    other = (1 - P_TIER) / 2
    return [other + (P_TIER - other) * belief for belief in intensity_belief(state)]


def _tier_counts(state: ReviewState) -> list[tuple[int, ...]]:
    counts = range(len(TIERS))
    return [tuple(n + (i == j) for j, n in enumerate(state.tiers)) for i in counts]


def _open(state: ReviewState, slot: Slot, grammar: Grammar) -> list[Branch]:
    p = 1 / len(slot.words)
    return [Branch(w, p, state._replace(style=STYLE_OF_OPENER[w])) for w in slot.words]


def _copula(state: ReviewState, slot: Slot, grammar: Grammar) -> list[Branch]:
    probability = {"was": 1 - P_NEGATION, "wasn't": P_NEGATION}
    return [Branch(w, probability[w], state._replace(negated=w == "wasn't")) for w in slot.words]


def _adverb(state: ReviewState, slot: Slot, grammar: Grammar) -> list[Branch]:
    typical = ADVERBS[state.style]
    other = (1 - P_TYPICAL_ADVERB) / (len(slot.words) - len(typical))
    p = P_TYPICAL_ADVERB / len(typical)
    return [Branch(w, p if w in typical else other, state) for w in slot.words]


def _adjective(state: ReviewState, slot: Slot, grammar: Grammar) -> list[Branch]:
    polarity_of, tier_of = polarity_forecast(state), tier_forecast(state)
    counts, is_last = _tier_counts(state), slot.clause == grammar.n_clauses - 1
    branches = []
    for lexical, tier in dict.fromkeys(map(SENSE_OF_ADJECTIVE.get, slot.words)):
        polarity = -lexical if state.negated else lexical
        after = state._replace(
            polarity_sum=state.polarity_sum + polarity,
            lexical_sum=state.lexical_sum + lexical,
            tiers=counts[tier],
            last=None if is_last else polarity,
            hint=None,
            negated=False,
        )
        words = ADJECTIVES[lexical][tier]
        probability = polarity_of[polarity] * tier_of[tier] / len(words)
        branches += [Branch(word, probability, after) for word in words]
    return branches


def _connector(state: ReviewState, slot: Slot, grammar: Grammar) -> list[Branch]:
    agree = polarity_forecast(state)[state.last]
    p_and = agree * (1 - P_FLIP) + (1 - agree) * P_FLIP
    both = zip(CONNECTORS, (p_and, 1 - p_and), (state.last, -state.last), strict=True)
    return [Branch(word, p, state._replace(last=None, hint=hint)) for word, p, hint in both]


def _verb(state: ReviewState, slot: Slot, grammar: Grammar) -> list[Branch]:
    belief, tier_of, counts = sentiment_belief(state), tier_forecast(state), _tier_counts(state)
    branches = []
    for word in slot.words:
        verdict, tier = SENSE_OF_VERB[word]
        sign = sum(belief[y] * _likelihood(verdict, y, P_VERDICT) for y in SIGNS)
        after = state._replace(verdict=verdict, tiers=counts[tier])
        branches.append(Branch(word, sign * tier_of[tier], after))
    return branches


def _tag(state: ReviewState, slot: Slot, grammar: Grammar) -> list[Branch]:
    return [Branch(w, p, state._replace(tag=w)) for w, p in zip(TAGS, P_TAGS, strict=True)]


def _indifferent(state: ReviewState, slot: Slot, grammar: Grammar) -> list[Branch]:
    return [Branch(word, 1 / len(slot.words), state) for word in slot.words]


def branches(state: ReviewState, slot: Slot, grammar: Grammar) -> list[Branch]:
    """Return every word that may fill a slot after a state, with its probability."""
    rule: Callable[[ReviewState, Slot, Grammar], list[Branch]] = {
        "OPEN": _open,
        "COP": _copula,
        "ADV": _adverb,
        "ADJ": _adjective,
        "CONN": _connector,
        "VERB": _verb,
        "TAG": _tag,
    }.get(slot.name, _indifferent)
    return rule(state, slot, grammar)
