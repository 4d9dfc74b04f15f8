"""Best-of-n: the expectation of the best of n samples, its KL bound, and its exact KL."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.functional.masks import check_same_shape

__all__ = [
    "best_of_n_distribution",
    "best_of_n_kl_bound",
    "best_of_n_mean",
    "best_of_n_weights",
]


def best_of_n_weights(
    rewards: Float[Tensor, "prompts samples"], n: int
) -> Float[Tensor, "prompts samples"]:
    """The probability that each sample is the best of n that are drawn from its row.

    1. Of the C(samples, n) ways to draw n without putting back, those hold no better reward than
       r_j that draw from the samples at or below it.
    2. The best reward is r_j in C(at or below, n) - C(below, n) of them; equal rewards share that.

    In float64, on the CPU; each row sums to 1.

    Raises:
        ValueError: n is below 1, or above the number of samples.
    """
    samples = rewards.shape[1]
    if not 1 <= n <= samples:
        raise ValueError(f"n={n} cannot be drawn from {samples} samples; give 1 to {samples}.")
    rewards = rewards.detach().cpu().contiguous()
    ordered = rewards.sort(1).values
    below = torch.searchsorted(ordered, rewards).double()
    up_to = torch.searchsorted(ordered, rewards, right=True).double()
    log_all = math.lgamma(samples + 1) - math.lgamma(samples - n + 1)

    def chance_within(k: Float[Tensor, "prompts samples"]) -> Float[Tensor, "prompts samples"]:
        """C(k, n) / C(samples, n): that n drawn without putting back are all among k of them."""
        log_ways = torch.lgamma(k + 1) - torch.lgamma((k - n).clamp_min(0) + 1)
        return (log_ways - log_all).exp().masked_fill(k < n, 0.0)

    return (chance_within(up_to) - chance_within(below)) / (up_to - below)


def best_of_n_mean(
    rewards: Float[Tensor, "prompts samples"], values: Float[Tensor, "prompts samples"], n: int
) -> Float[Tensor, " prompts"]:
    """The expected value of the sample with the best reward of n, without bias, for each prompt.

    Over all ways to draw n of the samples; of several with the best reward, each is taken as often
    as the others. With `values=rewards` it is the expected best reward.

    Source: the estimator over the order statistics of Nakano et al. 2021 (WebGPT, arXiv 2112.09332,
    appendix I) and, for pass@k, of Chen et al. 2021 (arXiv 2107.03374); with equal rewards.
    """
    check_same_shape(rewards=rewards, values=values)
    return (best_of_n_weights(rewards, n) * values.detach().cpu().double()).sum(1)


def best_of_n_kl_bound(n: int) -> float:
    """An upper bound on KL(best of n || policy), in nats per sequence: log n - (n - 1) / n.

    It is reached where no two samples have the same reward, and far above the truth where n is
    large beside the number of different samples.

    Source: Beirami et al. 2024 (arXiv 2401.01879), theorem 1 and its tightness.
    """
    if n < 1:
        raise ValueError(f"n={n} is no number of samples; give 1 or more.")
    return math.log(n) - (n - 1) / n


def best_of_n_distribution(
    chances: Float[Tensor, " outcome"], rewards: Float[Tensor, " outcome"], n: int
) -> Float[Tensor, " outcome"]:
    """The exact distribution of the best of n outcomes, of which each is drawn with these chances.

    1. A reward is the best with chance F(r)^n - F(r-)^n, F being the chance of r or less.
    2. Outcomes of equal reward share that in proportion to their own chances.

    In float64. Its KL from `chances` is that of best-of-n sampling, exactly, where outcomes are
    whole texts, or sets of texts that rewards do not tell apart.
    """
    check_same_shape(chances=chances, rewards=rewards)
    if n < 1:
        raise ValueError(f"n={n} is no number of samples; give 1 or more.")
    chances = chances.detach().cpu().double()
    levels, level = rewards.detach().cpu().unique(return_inverse=True)  # in rising order
    at = torch.zeros(len(levels), dtype=torch.float64).index_add(0, level, chances)
    up_to = at.cumsum(0).clamp_max(1.0)
    best = up_to**n - (up_to - at).clamp_min(0.0) ** n
    return chances * torch.where(at > 0, best / at, 0.0)[level]
