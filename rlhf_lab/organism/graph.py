"""The state graph of Reel, and policies on it: values, occupancy and KL."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.organism.beliefs import ReviewState, branches
from rlhf_lab.organism.grammar import Grammar
from rlhf_lab.organism.lexicon import VOCABULARY, WORD_IDS
from rlhf_lab.organism.rewards import Features, Reward


@dataclass(frozen=True)
class Graph:
    """The states of a grammar, position by position, and the transitions between them.

    states[t] are the states after token t; probability[t][s, w] is the probability of the next
    word w, and successor[t][s, w] the state after w (0, unused, if the probability is 0).
    """

    grammar: Grammar
    states: tuple[tuple[ReviewState, ...], ...]
    probability: tuple[Float[np.ndarray, "_ vocab"], ...]
    successor: tuple[Int[np.ndarray, "_ vocab"], ...]

    def final_features(self) -> Features:
        """Return the features of every state of a finished review."""
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
        """Return the state indices of prefixes, and a mask that is True while on the graph.

        Raises ValueError for tokens longer than a review or outside the vocabulary.
        """
        ids, seq_len = tokens.detach().cpu().numpy(), self.grammar.seq_len
        if not 1 <= ids.shape[1] <= seq_len:
            raise ValueError(f"tokens has {ids.shape[1]} columns. Use 1 to {seq_len}, first <bos>.")
        if ids.size and not (0 <= ids.min() and ids.max() < len(VOCABULARY)):
            most = len(VOCABULARY) - 1
            raise ValueError(f"tokens has ids from {ids.min()} to {ids.max()}. Use 0 to {most}.")
        index = np.zeros(ids.shape, dtype=np.int64)
        mask = np.zeros(ids.shape, dtype=bool)
        mask[:, 0] = ids[:, 0] == WORD_IDS["<bos>"]
        for t in range(1, ids.shape[1]):
            at = index[:, t - 1], ids[:, t]
            mask[:, t] = mask[:, t - 1] & (self.probability[t - 1][at] > 0)
            index[:, t] = np.where(mask[:, t], self.successor[t - 1][at], 0)
        return index, mask

    def look_up(
        self, table: Sequence[Float[np.ndarray, " _"]], tokens: Int[Tensor, "batch seq"]
    ) -> tuple[Float[Tensor, "batch seq"], Bool[Tensor, "batch seq"]]:
        """Look up a number of the state after every prefix, and the mask of defined ones.

        0 and False from the first token that the grammar does not allow.
        """
        index, mask = self.walk(tokens)
        columns = [table[t][index[:, t]] for t in range(tokens.shape[1])]
        values = np.where(mask, np.stack(columns, axis=1), 0.0)
        return torch.from_numpy(values), torch.from_numpy(mask)


def build_graph(grammar: Grammar) -> Graph:
    """Enumerate the states of a grammar slot by slot; equal successors have one number."""
    states, probability, successor = [(ReviewState(),)], [], []
    for slot in grammar.slots[1:]:
        shape = (len(states[-1]), len(VOCABULARY))
        chance, following = np.zeros(shape), np.zeros(shape, dtype=np.int64)
        number: dict[ReviewState, int] = {}
        if len(slot.words) == 1:  # a word that is certain changes no state
            word = WORD_IDS[slot.words[0]]
            chance[:, word], following[:, word] = 1.0, np.arange(len(chance))
            states.append(states[-1])
        else:
            rows = [branches(state, slot, grammar) for state in states[-1]]
            words = [WORD_IDS[branch.word] for branch in rows[0]]
            chance[:, words] = [[branch.probability for branch in row] for row in rows]
            following[:, words] = [[number.setdefault(x[2], len(number)) for x in r] for r in rows]
            states.append(tuple(number))
        probability.append(chance)
        successor.append(following)
    return Graph(grammar, tuple(states), tuple(probability), tuple(successor))


def backward_values(
    final: Float[np.ndarray, " state"],
    probability: Sequence[Float[np.ndarray, "_ vocab"]],
    successor: Sequence[Int[np.ndarray, "_ vocab"]],
) -> list[Float[np.ndarray, " _"]]:
    """Compute the value of every state at every position: the mean final score from there.

    1. Start after the last word, where the value of a state is its score in `final`.
    2. One position earlier, look up for each state s and each word w the value of the state
       `successor[t][s, w]` that the word leads to.
    3. The value of s is the mean of these values, weighted by `probability[t][s, w]`.
    4. Repeat to the first position, and return the values of all positions, in order.

    V(s) = sum_w pi(w | s) V(s w)   (Bellman's equation for a fixed policy, undiscounted; Sutton and
    Barto 2018, section 3.5)
    """
    values = [final]
    for p, following in zip(reversed(probability), reversed(successor), strict=True):
        values.append((p * values[-1][following]).sum(axis=1))
    return values[::-1]


@dataclass(frozen=True)
class GraphPolicy:
    """A policy that generates reviews state by state: the grammar itself, or an optimum."""

    graph: Graph
    probability: tuple[Float[np.ndarray, "_ vocab"], ...]

    def values(self, final: Float[np.ndarray, " state"]) -> tuple[Float[np.ndarray, " _"], ...]:
        """Compute the expected final score of every state at every position, backwards."""
        return tuple(backward_values(final, self.probability, self.graph.successor))

    def occupancy(self) -> tuple[Float[np.ndarray, " _"], ...]:
        """Compute the probability of every state at every position, forwards."""
        occupancy = [np.ones(1)]
        for t, p in enumerate(self.probability):
            flow = (occupancy[-1][:, None] * p).ravel()
            size = len(self.graph.states[t + 1])
            occupancy.append(np.bincount(self.graph.successor[t].ravel(), flow, size))
        return tuple(occupancy)

    def mean(self, final: Float[np.ndarray, " state"]) -> float:
        """Compute the expected final score of a review of the policy."""
        return float(self.values(final)[0][0])

    def kl_by_position(self, reference: "GraphPolicy") -> Float[Tensor, " gen"]:
        """Compute the expected KL(self || reference) of each token after <bos>, in nats.

        KL_t = E_{s ~ self} sum_w pi(w | s) log(pi(w | s) / ref(w | s)); the sum over t is the KL
        per sequence (chain rule).
        """
        triples = zip(self.occupancy()[:-1], self.probability, reference.probability, strict=True)
        kl = []
        for o, p, q in triples:
            ratio = np.where(p > 0, p, 1.0) / np.where(p > 0, q, 1.0)
            kl.append(float((o * (p * np.log(ratio)).sum(axis=1)).sum()))
        return torch.tensor(kl, dtype=torch.float64)


def grammar_policy(graph: Graph) -> GraphPolicy:
    """Return the grammar as a policy, the reference of all exact results."""
    return GraphPolicy(graph, graph.probability)


def state_values(
    policy: GraphPolicy, reward: Reward, tokens: Int[Tensor, "batch seq"]
) -> tuple[Float[Tensor, "batch seq"], Bool[Tensor, "batch seq"]]:
    """Compute V(prefix) = E[reward | prefix] under the policy, and the mask of defined values.

    False and 0 from the first token that the grammar does not allow.
    """
    values = policy.values(reward.score(policy.graph.final_features()))
    return policy.graph.look_up(values, tokens)


def token_information(policy: GraphPolicy, reward: Reward) -> Float[Tensor, " gen"]:
    """Compute I_t, the variance of the reward that the token at each position determines.

    I_t = E[(V(s_t+1) - V(s_t))^2], for every token after <bos>; increments of a martingale are
    uncorrelated, so the sum over t is Var(reward). Equation: Young 2026 (arXiv 2603.04851).
    """
    values = policy.values(reward.score(policy.graph.final_features()))
    information = []
    for t, (p, o) in enumerate(zip(policy.probability, policy.occupancy()[:-1], strict=True)):
        step = values[t + 1][policy.graph.successor[t]] - values[t][:, None]
        information.append(float((o[:, None] * p * step**2).sum()))
    return torch.tensor(information, dtype=torch.float64)
