"""Samples, entropy and figures of policies on the state graph, to hold exact numbers against."""

import numpy as np

from rlhf_lab.organism import FrontierPoint, GraphPolicy, Reward, optimal_policy, true_reward


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
