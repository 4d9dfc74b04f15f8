"""Exponential tilting and best-of-n: optimal distributions, frontier slopes, exact KL."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.functional.masks import at_least_float32, check_same_shape


def tilt(
    chances: Float[Tensor, "*rows n"], rewards: Float[Tensor, "*rows n"], beta: float
) -> Float[Tensor, "*rows n"]:
    """Compute the distribution over n outcomes that maximizes E[reward] - beta KL(. || `chances`).

    1. Subtract the largest reward of any possible outcome. This prevents an overflow, and does not
       change the result.
    2. Multiply each entry of `chances` by exp(reward / beta).
    3. Divide by the sum.

    Beta is in units of reward per nat. An outcome of probability 0 keeps probability 0, even if its
    reward is inf or nan. Raises ValueError unless beta > 0, and for a row of zeros.

    pi*(x) = ref(x) exp(r(x) / beta) / Z   (Korbak et al. 2022, arXiv 2205.11275)
    """
    if not beta > 0:
        raise ValueError(f"beta must be greater than 0, got {beta}.")
    check_same_shape(chances=chances, rewards=rewards)
    if (chances < 0).any() or not (chances > 0).any(-1).all():
        raise ValueError("`chances` has a negative entry or a row of zeros. Pass probabilities.")
    chances = at_least_float32(chances)
    rewards = torch.where(chances > 0, at_least_float32(rewards), -torch.inf)
    weights = chances * ((rewards - rewards.amax(-1, keepdim=True)) / beta).exp()
    return weights / weights.sum(-1, keepdim=True)


def tilt_slopes(
    probs: Float[Tensor, " outcome"],
    reward: Float[Tensor, " outcome"],
    measured: Float[Tensor, " outcome"],
) -> tuple[float, float]:
    """Compute the slopes of E[reward] and of E[measured] as a tilted policy is tilted further.

    1. The slope of E[reward] is the reward's variance under the policy, which is never negative.
    2. The slope of E[measured] is its covariance with the reward. If this is negative, then a
       higher reward means a lower score.

    `probs` are the tilted policy's probabilities. Slopes are per unit of lambda = 1 / beta, in
    float64. Raises ValueError unless the probabilities sum to 1 within 1e-4.

    d E_lambda[h] / d lambda = Cov_lambda(h, r), by the derivative of log Z
    """
    check_same_shape(probs=probs, reward=reward, measured=measured)
    p, r, h = (x.detach().cpu().double() for x in (probs, reward, measured))
    if abs(p.sum().item() - 1) > 1e-4:
        raise ValueError(f"probs must sum to 1, got a sum of {p.sum().item():.4g}.")
    apart = r - (p * r).sum()
    return (p * apart.square()).sum().item(), (p * apart * h).sum().item()


def excess_kl(
    reward: float,
    kl: float,
    frontier_reward: Float[Tensor, " point"],
    frontier_kl: Float[Tensor, " point"],
) -> float:
    """Compute the KL of a policy minus the least KL of any policy with the same reward, in nats.

    The frontier's points can be in any order; interpolate linearly between neighbors. A reward
    outside the frontier's range gives nan. In float64. Raises ValueError for fewer than two points.

    excess = KL - KL*(r), where KL*(r) is the KL at which the frontier reaches the reward r
    """
    check_same_shape(frontier_reward=frontier_reward, frontier_kl=frontier_kl)
    if len(frontier_reward) < 2:
        raise ValueError(f"The frontier must have at least 2 points, got {len(frontier_reward)}.")
    rewards, order = frontier_reward.detach().cpu().double().sort(stable=True)
    nats = frontier_kl.detach().cpu().double()[order]
    if not rewards[0] <= reward <= rewards[-1]:
        return math.nan
    right = int(torch.searchsorted(rewards, reward).clamp(1, len(rewards) - 1))
    left = right - 1
    width = (rewards[right] - rewards[left]).item()
    share = (reward - rewards[left].item()) / width if width else 0.0
    return kl - torch.lerp(nats[left], nats[right], share).item()


def best_of_n_weights(
    rewards: Float[Tensor, "prompts samples"], n: int
) -> Float[Tensor, "prompts samples"]:
    """Compute the probability that each sample is the best of n that are drawn from its row.

    1. Of the C(samples, n) ways to draw n without replacement, no reward is better than r_j in
       those that draw from the samples at or below it.
    2. The best reward is r_j in C(at or below, n) - C(below, n) of them; equal rewards share that.

    In float64, on the CPU. Raises ValueError if n is below 1 or above the number of samples.
    """
    samples = rewards.shape[1]
    if not 1 <= n <= samples:
        raise ValueError(f"n must be between 1 and {samples} (the samples of a row), got {n}.")
    rewards = rewards.detach().cpu().contiguous()
    ordered = rewards.sort(1).values
    below = torch.searchsorted(ordered, rewards).double()
    up_to = torch.searchsorted(ordered, rewards, right=True).double()
    log_all = math.lgamma(samples + 1) - math.lgamma(samples - n + 1)

    def fraction_within(k: Float[Tensor, "prompts samples"]) -> Float[Tensor, "prompts samples"]:
        """C(k, n) / C(samples, n): n drawn without replacement are all among k of them."""
        log_ways = torch.lgamma(k + 1) - torch.lgamma((k - n).clamp_min(0) + 1)
        return (log_ways - log_all).exp().masked_fill(k < n, 0.0)

    return (fraction_within(up_to) - fraction_within(below)) / (up_to - below)


def best_of_n_mean(
    rewards: Float[Tensor, "prompts samples"], values: Float[Tensor, "prompts samples"], n: int
) -> Float[Tensor, " prompts"]:
    """Estimate, without bias, the expected value of the sample with the best reward of n.

    Source: Nakano et al. 2021, WebGPT, arXiv 2112.09332, appendix I
    """
    check_same_shape(rewards=rewards, values=values)
    return (best_of_n_weights(rewards, n) * values.detach().cpu().double()).sum(1)


def best_of_n_kl_bound(n: int) -> float:
    """Compute an upper bound on KL(best of n || policy), in nats; tight without equal rewards.

    log n - (n - 1) / n   (Beirami et al. 2024, arXiv 2401.01879, theorem 1)
    """
    if not n >= 1 or n % 1:
        raise ValueError(f"n must be at least 1, got {n}. Pass an integer.")
    return math.log(n) - (n - 1) / n


def best_of_n_distribution(
    chances: Float[Tensor, " outcome"], rewards: Float[Tensor, " outcome"], n: int
) -> Float[Tensor, " outcome"]:
    """Compute the exact distribution of the best of n outcomes drawn with these probabilities.

    A reward is the best with probability F(r)^n - F(r-)^n, which outcomes of equal reward share in
    proportion to their own. In float64. Raises ValueError for an n below 1.
    """
    check_same_shape(chances=chances, rewards=rewards)
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}.")
    chances = chances.detach().cpu().double()
    chances = chances / chances.sum()
    levels, level = rewards.detach().cpu().unique(return_inverse=True)  # in rising order
    at = torch.zeros(len(levels), dtype=torch.float64).index_add(0, level, chances)
    up_to = at.cumsum(0).clamp_max(1.0)
    best = up_to**n - (up_to - at).clamp_min(0.0) ** n
    return chances * torch.where(at > 0, best / at, 0.0)[level]
