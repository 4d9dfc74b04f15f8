"""Exponential tilting: the best distribution at a price per nat of KL, slopes, and excess KL."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.functional.masks import at_least_float32, check_same_shape

__all__ = ["excess_kl", "tilt", "tilt_slopes"]


def tilt(
    chances: Float[Tensor, "*rows n"], rewards: Float[Tensor, "*rows n"], beta: float
) -> Float[Tensor, "*rows n"]:
    """Give the distribution over n outcomes that maximizes E[reward] - beta KL(. || chances).

    1. Subtract the largest reward of an outcome that can happen, so that nothing overflows: the
       result is the same.
    2. Multiply each chance by exp(reward / beta).
    3. Divide by the sum.

    Rewards and beta are in one unit, beta per nat. An outcome of chance 0 keeps chance 0, whatever
    its reward, also inf or nan. Half-precision input gives a float32 result.

    Raises ValueError for a beta that is not above 0, and for unequal shapes.

    pi*(x) = ref(x) exp(r(x) / beta) / Z   (Korbak et al. 2022, arXiv 2205.11275)
    """
    if not beta > 0:
        raise ValueError(f"beta is {beta}; give a price per nat above 0.")
    check_same_shape(chances=chances, rewards=rewards)
    chances = at_least_float32(chances)
    rewards = torch.where(chances > 0, at_least_float32(rewards), -torch.inf)
    weights = chances * ((rewards - rewards.amax(-1, keepdim=True)) / beta).exp()
    return weights / weights.sum(-1, keepdim=True)


def tilt_slopes(
    probs: Float[Tensor, " outcome"],
    reward: Float[Tensor, " outcome"],
    measured: Float[Tensor, " outcome"],
) -> tuple[float, float]:
    """Give the slopes of E[reward] and of E[measured] as a tilted policy is tilted further.

    1. The slope of the reward's mean is the variance of the reward among the texts that the policy
       writes now, which is never negative.
    2. That of another score's mean is its covariance with the reward: where that is negative, what
       raises the reward lowers the score.

    `probs` are those of the tilted policy itself, at the tilt where the slopes are wanted; they sum
    to 1. Slopes are per unit of lambda = 1 / beta; in float64. Raises ValueError for unequal
    shapes, and for probabilities that do not sum to 1 within 1e-4.

    d E_lambda[h] / d lambda = Cov_lambda(h, r), by the derivative of log Z
    """
    check_same_shape(probs=probs, reward=reward, measured=measured)
    p, r, h = (x.detach().cpu().double() for x in (probs, reward, measured))
    if abs(p.sum().item() - 1) > 1e-4:
        raise ValueError(f"probs sum to {p.sum().item():.4g}; give probabilities that sum to 1.")
    apart = r - (p * r).sum()
    return (p * apart.square()).sum().item(), (p * apart * h).sum().item()


def excess_kl(
    reward: float,
    kl: float,
    frontier_reward: Float[Tensor, " point"],
    frontier_kl: Float[Tensor, " point"],
) -> float:
    """Give the nats that a policy spends beyond the cheapest policy of the same reward.
    The points of the frontier come in any order; between two neighbours it is a straight line.
    Fewer nats than the frontier spends are a negative number, and a reward beyond the ends of the
    frontier is nan. In float64.

    Raises ValueError for fewer than two points, or unequal shapes.

    excess = KL - KL*(r), with KL*(r) the KL at which the frontier reaches the reward r
    """
    check_same_shape(frontier_reward=frontier_reward, frontier_kl=frontier_kl)
    if len(frontier_reward) < 2:
        raise ValueError(
            f"the frontier has {len(frontier_reward)} points; give at least 2, to read between."
        )
    rewards, order = frontier_reward.detach().cpu().double().sort(stable=True)
    nats = frontier_kl.detach().cpu().double()[order]
    if not rewards[0] <= reward <= rewards[-1]:
        return math.nan
    right = int(torch.searchsorted(rewards, reward).clamp(1, len(rewards) - 1))
    left = right - 1
    width = (rewards[right] - rewards[left]).item()
    share = (reward - rewards[left].item()) / width if width else 0.0
    return kl - torch.lerp(nats[left], nats[right], share).item()
