"""Exact solution of Reel: beliefs, values, token information, KL-regularized optimal policies."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.organism.grammar import (
    ADJECTIVES,
    ADVERBS,
    CONNECTORS,
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
    STYLES,
    TAGS,
    TIERS,
    VOCABULARY,
    WORD_IDS,
    Grammar,
    Slot,
)
from rlhf_lab.organism.rewards import Features, Reward, gold

SIGNS = (1, -1)


class ReviewState(NamedTuple):
    """All of a prefix that the future and the rewards depend on; None where not said (yet).

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
    """One word that may come next, its probability, and the state behind it."""

    word: str
    probability: float
    state: ReviewState


def odds(log_odds: float) -> dict[int, float]:
    """Turn log odds into the probabilities of +1 and -1."""
    positive = float(1 / (1 + np.exp(-log_odds)))
    return {1: positive, -1: 1 - positive}


def _likelihood(sign: int, truth: int, probability: float) -> float:
    """Give the probability that a sign is what it is when it equals the truth w.p. probability."""
    return probability if sign == truth else 1 - probability


def sentiment_belief(state: ReviewState, with_hint: bool = True) -> dict[int, float]:
    """Give P(y | prefix), with or without what an announced polarity tells.

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
    return odds(log_odds)


def intensity_belief(state: ReviewState) -> list[float]:
    """Give P(i | prefix): proportional to the probability of the tiers read."""
    weight = np.array([(P_TIER / ((1 - P_TIER) / 2)) ** count for count in state.tiers])
    return (weight / weight.sum()).tolist()


def style_belief(state: ReviewState) -> list[float]:
    """Give P(r | prefix): uniform before the opening word, which settles it."""
    if state.style is None:
        return [1 / len(STYLES)] * len(STYLES)
    return [float(style == state.style) for style in range(len(STYLES))]


def polarity_forecast(state: ReviewState) -> dict[int, float]:
    """Give P(polarity of the clause to come | prefix), its announcement included."""
    belief = sentiment_belief(state, with_hint=False)
    weight = {p: sum(belief[y] * _likelihood(p, y, P_POLARITY) for y in SIGNS) for p in SIGNS}
    if state.hint is not None:
        weight = {p: w * _likelihood(p, state.hint, 1 - P_FLIP) for p, w in weight.items()}
    total = sum(weight.values())
    return {p: w / total for p, w in weight.items()}


def tier_forecast(state: ReviewState) -> list[float]:
    """Give P(tier of the next graded word | prefix)."""
    other = (1 - P_TIER) / 2
    return [other + (P_TIER - other) * belief for belief in intensity_belief(state)]


def _tier_counts(state: ReviewState) -> list[tuple[int, ...]]:
    """Give the counts of tiers after one more word of each tier."""
    return [
        tuple(count + (t == tier) for t, count in enumerate(state.tiers))
        for tier in range(len(TIERS))
    ]


def _open(state: ReviewState, slot: Slot, grammar: Grammar) -> list[Branch]:
    share = 1 / len(slot.words)
    return [Branch(w, share, state._replace(style=STYLE_OF_OPENER[w])) for w in slot.words]


def _copula(state: ReviewState, slot: Slot, grammar: Grammar) -> list[Branch]:
    probability = {"was": 1 - P_NEGATION, "wasn't": P_NEGATION}
    return [Branch(w, probability[w], state._replace(negated=w == "wasn't")) for w in slot.words]


def _adverb(state: ReviewState, slot: Slot, grammar: Grammar) -> list[Branch]:
    own = ADVERBS[state.style]
    other = (1 - P_OWN_ADVERB) / (len(slot.words) - len(own))
    return [Branch(w, P_OWN_ADVERB / len(own) if w in own else other, state) for w in slot.words]


def _adjective(state: ReviewState, slot: Slot, grammar: Grammar) -> list[Branch]:
    polarity_of, tier_of, counts = (
        polarity_forecast(state),
        tier_forecast(state),
        _tier_counts(state),
    )
    is_last = slot.clause == grammar.n_clauses - 1
    branches = []
    for word in slot.words:
        lexical, tier = SENSE_OF_ADJECTIVE[word]
        polarity = -lexical if state.negated else lexical
        after = state._replace(
            polarity_sum=state.polarity_sum + polarity,
            lexical_sum=state.lexical_sum + lexical,
            tiers=counts[tier],
            last=None if is_last else polarity,
            hint=None,
            negated=False,
        )
        probability = polarity_of[polarity] * tier_of[tier] / len(ADJECTIVES[lexical][tier])
        branches.append(Branch(word, probability, after))
    return branches


def _connector(state: ReviewState, slot: Slot, grammar: Grammar) -> list[Branch]:
    agree = polarity_forecast(state)[state.last]
    says_and = agree * (1 - P_FLIP) + (1 - agree) * P_FLIP
    both = zip(CONNECTORS, (says_and, 1 - says_and), (state.last, -state.last), strict=True)
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
    """Give every word that may fill a slot after a state, by the grammar's own probabilities."""
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


@dataclass(frozen=True)
class Graph:
    """The states of a grammar, position by position, and the ways between them.

    states[t] are the states after token t; probability[t][s, w] is that of word w coming next, and
    successor[t][s, w] the state it leads to (0 and of no meaning where the probability is 0).
    """

    grammar: Grammar
    states: tuple[tuple[ReviewState, ...], ...]
    probability: tuple[Float[np.ndarray, "_ vocab"], ...]
    successor: tuple[Int[np.ndarray, "_ vocab"], ...]

    @property
    def n_states(self) -> int:
        """The number of states over all positions."""
        return sum(map(len, self.states))

    def final_features(self) -> Features:
        """Give what rewards may look at for every state of a finished review."""
        final, shape = self.states[-1], len(self.states[-1])
        lexical = np.array([state.lexical_sum for state in final])
        return Features(
            grammatical=np.ones(shape, dtype=bool),
            polarity_sum=np.array([state.polarity_sum for state in final]),
            lexical_sum=lexical,
            adjective_sum=lexical,
            verdict=np.array([state.verdict for state in final]),
            popcorn=np.array([state.tag == "popcorn" for state in final]),
            n_words=np.full(shape, self.grammar.seq_len - 2),
        )

    def walk(
        self, tokens: Int[Tensor, "batch seq"]
    ) -> tuple[Int[np.ndarray, "batch seq"], Bool[np.ndarray, "batch seq"]]:
        """Follow prefixes through the graph.

        1. Start behind <bos>; take the way of every next token.
        2. A prefix that the grammar cannot begin with is off the graph from there on.

        Gives state indices, and a mask that is True while on the graph. Raises ValueError for
        tokens longer than a review or outside the vocabulary.
        """
        ids = tokens.detach().cpu().numpy()
        _check_tokens(ids, self.grammar.seq_len)
        index = np.zeros(ids.shape, dtype=np.int64)
        mask = np.zeros(ids.shape, dtype=bool)
        mask[:, 0] = ids[:, 0] == WORD_IDS["<bos>"]
        for t in range(1, ids.shape[1]):
            at = index[:, t - 1], ids[:, t]
            mask[:, t] = mask[:, t - 1] & (self.probability[t - 1][at] > 0)
            index[:, t] = np.where(mask[:, t], self.successor[t - 1][at], 0)
        return index, mask


def _check_tokens(ids: Int[np.ndarray, "batch seq"], seq_len: int) -> None:
    """Refuse prefixes that are empty, too long, or not made of Reel's ids."""
    if not 1 <= ids.shape[1] <= seq_len:
        raise ValueError(f"tokens has {ids.shape[1]} columns; give 1 to {seq_len}, <bos> first.")
    if ids.size and not (0 <= ids.min() and ids.max() < len(VOCABULARY)):
        raise ValueError(
            f"tokens has ids from {ids.min()} to {ids.max()}; Reel has 0 to {len(VOCABULARY) - 1}."
        )


class Level(NamedTuple):
    """One step of the graph: the word probabilities, the successors, and the states reached."""

    probability: Float[np.ndarray, "state vocab"]
    successor: Int[np.ndarray, "state vocab"]
    reached: tuple[ReviewState, ...]


def expand(states: tuple[ReviewState, ...], slot: Slot, grammar: Grammar) -> Level:
    """Fill one slot after every state.

    1. A slot with a single word leaves every state as it is.
    2. Otherwise branch every state, and give equal successors one number.
    """
    shape = (len(states), len(VOCABULARY))
    probability, successor = np.zeros(shape), np.zeros(shape, dtype=np.int64)
    if len(slot.words) == 1:
        probability[:, WORD_IDS[slot.words[0]]] = 1
        successor[:, WORD_IDS[slot.words[0]]] = np.arange(len(states))
        return Level(probability, successor, states)
    number: dict[ReviewState, int] = {}
    for s, state in enumerate(states):
        for word, p, after in branches(state, slot, grammar):
            probability[s, WORD_IDS[word]] = p
            successor[s, WORD_IDS[word]] = number.setdefault(after, len(number))
    return Level(probability, successor, tuple(number))


def build_graph(grammar: Grammar) -> Graph:
    """Enumerate the states of a grammar.

    1. Start with one state, behind <bos>.
    2. Fill slot after slot.
    """
    start = (ReviewState(),)
    levels: list[Level] = []
    for slot in grammar.slots[1:]:
        levels.append(expand(levels[-1].reached if levels else start, slot, grammar))
    return Graph(
        grammar=grammar,
        states=(start, *(level.reached for level in levels)),
        probability=tuple(level.probability for level in levels),
        successor=tuple(level.successor for level in levels),
    )


@dataclass(frozen=True)
class GraphPolicy:
    """A policy that writes reviews state by state: the grammar itself, or an optimum."""

    graph: Graph
    probability: tuple[Float[np.ndarray, "_ vocab"], ...]

    def values(self, final: Float[np.ndarray, " state"]) -> tuple[Float[np.ndarray, " _"], ...]:
        """Give the expected final score of every state at every position, backwards."""
        values = [final]
        for p, successor in zip(self.probability[::-1], self.graph.successor[::-1], strict=True):
            values.append((p * values[-1][successor]).sum(axis=1))
        return tuple(values[::-1])

    def occupancy(self) -> tuple[Float[np.ndarray, " _"], ...]:
        """Give the probability of being in every state at every position, forwards."""
        occupancy = [np.ones(1)]
        for t, p in enumerate(self.probability):
            flow = (occupancy[-1][:, None] * p).ravel()
            size = len(self.graph.states[t + 1])
            occupancy.append(np.bincount(self.graph.successor[t].ravel(), flow, size))
        return tuple(occupancy)

    def mean(self, final: Float[np.ndarray, " state"]) -> float:
        """Give the expected final score of a review that the policy writes."""
        return float(self.values(final)[0][0])

    def entropy(self) -> float:
        """Give the entropy of a review, in nats."""
        pairs = zip(self.occupancy()[:-1], self.probability, strict=True)
        return -sum(float((o * _plogq(p, p)).sum()) for o, p in pairs)

    def kl_by_position(self, reference: "GraphPolicy") -> Float[Tensor, " gen"]:
        """Give the expected KL(self || reference) of each token behind <bos>, in nats.

        KL_t = E_{s ~ self} sum_w pi(w | s) log(pi(w | s) / ref(w | s)); the sum over t is the KL
        per sequence (chain rule).
        """
        triples = zip(self.occupancy()[:-1], self.probability, reference.probability, strict=True)
        kl = [float((o * (_plogq(p, p) - _plogq(p, q))).sum()) for o, p, q in triples]
        return torch.tensor(kl, dtype=torch.float64)

    def next_probs(self, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq vocab"]:
        """Give the exact distribution of the token behind every position, in float64.

        Raises ValueError for an ungrammatical prefix or one with nothing behind it.
        """
        index, mask = self.graph.walk(tokens)
        if tokens.shape[1] >= self.graph.grammar.seq_len or not mask.all():
            raise ValueError(
                f"tokens has {int((~mask.all(axis=1)).sum())} ungrammatical rows and "
                f"{tokens.shape[1]} columns; give grammatical prefixes without <eos>."
            )
        columns = [self.probability[t][index[:, t]] for t in range(tokens.shape[1])]
        return torch.from_numpy(np.stack(columns, axis=1))

    def sample(self, n: int, rng: np.random.Generator) -> Int[Tensor, "batch seq"]:
        """Draw n whole reviews, <bos> and <eos> included.

        1. At every state compare one uniform number with the cumulative sum over words.
        2. Go on from the state that the word leads to.
        """
        state = np.zeros(n, dtype=np.int64)
        tokens = [np.full(n, WORD_IDS["<bos>"])]
        for p, successor in zip(self.probability, self.graph.successor, strict=True):
            cumulative = p.cumsum(axis=1)[state]
            draw = rng.random((n, 1)) * cumulative[:, -1:]
            tokens.append((cumulative <= draw).sum(axis=1))
            state = successor[state, tokens[-1]]
        return torch.from_numpy(np.stack(tokens, axis=1))


def _plogq(
    p: Float[np.ndarray, "state vocab"], q: Float[np.ndarray, "state vocab"]
) -> Float[np.ndarray, " state"]:
    """Sum p log q over words, where 0 log 0 is 0."""
    return (p * np.log(np.where(p > 0, q, 1.0))).sum(axis=1)


def grammar_policy(graph: Graph) -> GraphPolicy:
    """Give the grammar itself as a policy: the reference of everything exact."""
    return GraphPolicy(graph, graph.probability)


def optimal_policy(reference: GraphPolicy, reward: Reward, beta: float) -> GraphPolicy:
    """Give the policy that maximises E[reward] - beta KL(policy || reference).

    1. Soft values backwards: W(s) = log sum_w ref(w | s) exp W(s'); W = reward / beta at the end.
    2. pi*(w | s) = ref(w | s) exp(W(s') - W(s)), so that pi*(x) = ref(x) exp(reward / beta) / Z.

    Equation: Korbak et al. 2022 (arXiv 2205.11275, section 3); Levine 2018 (arXiv 1805.00909).
    Raises ValueError for a beta that is not above 0.
    """
    if not beta > 0:
        raise ValueError(f"beta is {beta}; give a KL coefficient above 0.")
    graph = reference.graph
    soft_value, tables = reward.score(graph.final_features()) / beta, []
    for p, successor in zip(reference.probability[::-1], graph.successor[::-1], strict=True):
        ahead = np.where(p > 0, soft_value[successor], -np.inf)
        highest = ahead.max(axis=1, keepdims=True)
        weight = p * np.exp(ahead - highest)
        total = weight.sum(axis=1, keepdims=True)
        tables.append(weight / total)
        soft_value = (highest + np.log(total))[:, 0]
    return GraphPolicy(graph, tuple(tables[::-1]))


class FrontierPoint(NamedTuple):
    """One exact optimum: its expected rewards, KL in nats per sequence, and share of popcorn."""

    beta: float
    proxy: float
    gold: float
    kl_per_sequence: float
    popcorn: float


def frontier(reference: GraphPolicy, proxy: Reward, betas: Iterable[float]) -> list[FrontierPoint]:
    """Give the best reward that each KL budget can buy, one point per beta.

    1. Solve for the optimal policy of the proxy.
    2. Measure the proxy, gold, KL and popcorn under it.
    """
    features = reference.graph.final_features()
    points = []
    for beta in betas:
        policy = optimal_policy(reference, proxy, beta)
        points.append(
            FrontierPoint(
                beta=beta,
                proxy=policy.mean(proxy.score(features)),
                gold=policy.mean(gold.score(features)),
                kl_per_sequence=float(policy.kl_by_position(reference).sum()),
                popcorn=policy.mean(features.popcorn.astype(float)),
            )
        )
    return points


class Traced(NamedTuple):
    """Numbers along reviews, and a mask that is True where they are defined."""

    values: Float[Tensor, "batch seq"]
    mask: Bool[Tensor, "batch seq"]


def state_values(policy: GraphPolicy, reward: Reward, tokens: Int[Tensor, "batch seq"]) -> Traced:
    """Give V(prefix) = E[reward | prefix] at every position, when the policy writes the rest.

    1. Solve the values of all states backwards.
    2. Look up the state behind every prefix.

    Masked (and 0) from the first token on that the grammar does not allow: the policy never gets
    there. gold pays exactly 0 there.
    """
    index, mask = policy.graph.walk(tokens)
    values = policy.values(reward.score(policy.graph.final_features()))
    columns = [values[t][index[:, t]] for t in range(tokens.shape[1])]
    found = np.where(mask, np.stack(columns, axis=1), 0.0)
    return Traced(torch.from_numpy(found), torch.from_numpy(mask))


def token_advantages(
    policy: GraphPolicy, reward: Reward, tokens: Int[Tensor, "batch seq"]
) -> Traced:
    """Give the exact advantage of every token behind <bos>: V(s_t+1) - V(s_t).

    With a reward at the end and no discount the sum over a review is reward - V(<bos>). Shapes are
    [batch, seq - 1]. Equation: Sutton & Barto 2018, section 13.5, with exact values.
    """
    values, mask = state_values(policy, reward, tokens)
    keep = mask[:, 1:]
    return Traced(torch.where(keep, values[:, 1:] - values[:, :-1], 0.0), keep)


def token_information(policy: GraphPolicy, reward: Reward) -> Float[Tensor, " gen"]:
    """Give I_t, the variance of the reward that the token at each position settles.

    I_t = E[(V(s_t+1) - V(s_t))^2], for every token behind <bos>; increments of a martingale are
    uncorrelated, so the sum over t is Var(reward). Equation: Young 2026 (arXiv 2603.04851).
    """
    values = policy.values(reward.score(policy.graph.final_features()))
    information = []
    for t, (p, o) in enumerate(zip(policy.probability, policy.occupancy()[:-1], strict=True)):
        step = values[t + 1][policy.graph.successor[t]] - values[t][:, None]
        information.append(float((o[:, None] * p * step**2).sum()))
    return torch.tensor(information, dtype=torch.float64)


class Belief(NamedTuple):
    """Posteriors of the latents at every position; the joint one is their product.

    positive is P(y=+ | prefix); the mask is True while the prefix is grammatical, and a position
    outside it holds the prior.
    """

    positive: Float[Tensor, "batch seq"]
    intensity: Float[Tensor, "batch seq tier"]
    style: Float[Tensor, "batch seq style"]
    mask: Bool[Tensor, "batch seq"]


def belief(graph: Graph, tokens: Int[Tensor, "batch seq"]) -> Belief:
    """Give the posterior of sentiment, intensity and style after every token.

    1. Compute the posterior of every state.
    2. Look up the state behind every prefix.
    """
    index, mask = graph.walk(tokens)
    rows = []
    for t in range(tokens.shape[1]):
        states = graph.states[t]
        table = [[sentiment_belief(s)[1], *intensity_belief(s), *style_belief(s)] for s in states]
        prior = np.array([0.5, *[1 / len(TIERS)] * len(TIERS), *[1 / len(STYLES)] * len(STYLES)])
        rows.append(np.where(mask[:, t, None], np.array(table)[index[:, t]], prior))
    found = torch.from_numpy(np.stack(rows, axis=1))
    split = 1 + len(TIERS)
    return Belief(found[..., 0], found[..., 1:split], found[..., split:], torch.from_numpy(mask))
