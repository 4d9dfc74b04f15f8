"""The state graph of Reel, and policies on it: values, occupancy, entropy, KL and sampling."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.organism.beliefs import ReviewState, branches
from rlhf_lab.organism.grammar import Grammar, Slot
from rlhf_lab.organism.lexicon import VOCABULARY, WORD_IDS
from rlhf_lab.organism.rewards import Features


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
