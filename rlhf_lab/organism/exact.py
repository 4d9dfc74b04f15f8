"""Exact solution of Reel: values, token information, KL-regularized optimal policies."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.functional.best_of_n import best_of_n_distribution
from rlhf_lab.organism.graph import GraphPolicy
from rlhf_lab.organism.rewards import Reward, gold


def optimal_policy(reference: GraphPolicy, reward: Reward, beta: float) -> GraphPolicy:
    """Give the policy that maximises E[reward] - beta KL(policy || reference).

    1. Soft values backwards: W(s) = log sum_w ref(w | s) exp W(s'); W = reward / beta at the end.
    2. pi*(w | s) = ref(w | s) exp(W(s') - W(s)), so that pi*(x) = ref(x) exp(reward / beta) / Z.

    Equation: Korbak et al. 2022 (arXiv 2205.11275, section 3); Levine 2018 (arXiv 1805.00909).
    Raises ValueError for a beta that is not above 0.
    """
    _check_beta(beta)
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


def _check_beta(beta: float) -> None:
    if not beta > 0:
        raise ValueError(f"beta is {beta}; give a KL coefficient above 0.")


class FrontierPoint(NamedTuple):
    """One exact optimum: its expected rewards, KL in nats per sequence, and share of popcorn."""

    beta: float
    proxy: float
    gold: float
    kl_per_sequence: float
    popcorn: float


def frontier(reference: GraphPolicy, proxy: Reward, betas: Iterable[float]) -> list[FrontierPoint]:
    """Give the best reward that each KL budget can buy: the figures of `optimal_policy` per beta.

    Raises ValueError for a beta that is not above 0.
    """
    features, chances = reference.graph.final_features(), reference.occupancy()[-1]
    figures = [proxy.score(features), gold.score(features), features.popcorn]
    points = []
    for beta in betas:
        best, kl = tilted(chances, figures[0], beta)
        proxy_mean, gold_mean, popcorn = (float(best @ figure) for figure in figures)
        points.append(FrontierPoint(beta, proxy_mean, gold_mean, kl, popcorn))
    return points


class BestOfNPoint(NamedTuple):
    """The exact best of n reviews: its expected rewards, and its KL in nats per sequence."""

    n: int
    proxy: float
    gold: float
    kl_per_sequence: float


def best_of_n(reference: GraphPolicy, proxy: Reward, numbers: Iterable[int]) -> list[BestOfNPoint]:
    """Give what the best of n reviews of a policy earns, exactly, where a proxy chooses it.

    Reviews that end in one state earn the same, so that the distribution over the final states
    has the rewards and the KL of that over reviews.

    Raises ValueError for an n below 1.
    """
    features, chances = reference.graph.final_features(), torch.tensor(reference.occupancy()[-1])
    scores, golds = (torch.tensor(reward.score(features)) for reward in (proxy, gold))
    points = []
    for n in numbers:
        best = best_of_n_distribution(chances, scores, n)
        kl = (torch.special.xlogy(best, best) - torch.special.xlogy(best, chances)).sum()
        points.append(
            BestOfNPoint(n, float(best @ scores), float(best @ golds), max(0.0, float(kl)))
        )
    return points


def tilted(
    chances: Float[np.ndarray, " state"], scores: Float[np.ndarray, " state"], beta: float
) -> tuple[Float[np.ndarray, " state"], float]:
    """Give the optimum's probability of every whole review, and its KL in nats per sequence.

    pi*(x) = ref(x) exp(r(x) / beta) / Z, and KL = E[r] / beta - log Z, from the probabilities
    ref(x) and the rewards r(x) alone. Equation: Korbak et al. 2022 (arXiv 2205.11275).
    """
    _check_beta(beta)
    highest = scores.max() / beta
    weight = chances * np.exp(scores / beta - highest)
    best = weight / weight.sum()
    return best, float(best @ scores / beta - np.log(weight.sum()) - highest)


def state_values(
    policy: GraphPolicy, reward: Reward, tokens: Int[Tensor, "batch seq"]
) -> tuple[Float[Tensor, "batch seq"], Bool[Tensor, "batch seq"]]:
    """Give V(prefix) = E[reward | prefix] when the policy writes the rest, and where it is defined.

    Not defined (and 0) from the first token on that the grammar does not allow: the policy never
    gets there. gold pays exactly 0 there.
    """
    values = policy.values(reward.score(policy.graph.final_features()))
    return policy.graph.look_up(values, tokens)


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
