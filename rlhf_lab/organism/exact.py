"""Exact solution of Reel: beliefs, values, token information, KL-regularized optimal policies."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.organism.beliefs import intensity_belief, sentiment_belief, style_belief
from rlhf_lab.organism.graph import Graph, GraphPolicy
from rlhf_lab.organism.lexicon import STYLES, TIERS
from rlhf_lab.organism.rewards import Reward, gold


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
