"""Samples, entropy and figures of policies on the state graph, to hold exact numbers against."""

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from rlhf_lab.organism import (
    WORD_IDS,
    FrontierPoint,
    GraphPolicy,
    Reward,
    optimal_policy,
    true_reward,
)


def sample(policy: GraphPolicy, n: int, rng: np.random.Generator) -> Int[Tensor, "batch seq"]:
    """Draw n whole reviews, <bos> and <eos> included.

    1. At every state compare one uniform number with the cumulative sum over words.
    2. Go on from the state that the word leads to.
    """
    state = np.zeros(n, dtype=np.int64)
    tokens = [np.full(n, WORD_IDS["<bos>"])]
    for p, successor in zip(policy.probability, policy.graph.successor, strict=True):
        cumulative = p.cumsum(axis=1)[state]
        draw = rng.random((n, 1)) * cumulative[:, -1:]
        tokens.append((cumulative <= draw).sum(axis=1))
        state = successor[state, tokens[-1]]
    return torch.from_numpy(np.stack(tokens, axis=1))


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
