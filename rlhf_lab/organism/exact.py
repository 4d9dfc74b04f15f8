"""Exact figures of a policy on Reel: values of prefixes, and the reward that each token settles."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.organism.graph import GraphPolicy
from rlhf_lab.organism.rewards import Reward


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
