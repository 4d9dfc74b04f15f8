"""KL-regularized optima on Reel, exactly: optimal policies, the frontier, and the best of n."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.functional.tilting import best_of_n_distribution, tilt
from rlhf_lab.organism.graph import GraphPolicy
from rlhf_lab.organism.rewards import Reward, true_reward


def soft_backup(
    later: Float[Tensor, " state_after"],
    probability: Float[Tensor, "state vocab"],
    successor: Int[Tensor, "state vocab"],
) -> tuple[Float[Tensor, " state"], Float[Tensor, "state vocab"]]:
    """Compute the soft values of all states at one position, and the optimal policy there.

    1. Look up the soft value of the state that each word leads to. Ignore words of probability 0.
    2. A state's soft value is the log of the mean exponential of these values, where the mean is
       over the reference's next words.
    3. The optimal policy is the reference, tilted by the soft values of the next states.

    Soft values are in nats (reward divided by beta). Words of probability 0 keep it.

    W(s) = log sum_a ref(a | s) exp W(s a),  pi*(a | s) = ref(a | s) exp(W(s a) - W(s))
    (Levine 2018, arXiv 1805.00909)
    """
    ahead = later[successor].masked_fill(probability == 0, -torch.inf)
    value = (probability.log() + ahead).logsumexp(-1)
    return value, probability * (ahead - value[:, None]).exp()


def mean_backup(
    later: Float[Tensor, " state_after"],
    probability: Float[Tensor, "state vocab"],
    successor: Int[Tensor, "state vocab"],
    beta: float,
) -> tuple[Float[Tensor, " state"], Float[Tensor, "state vocab"]]:
    """Compute values and policy at one position when the KL of later positions is ignored.

    1. Look up the value of the state that each word leads to.
    2. The policy is the reference, tilted by the values ahead.
    3. The value of a state is the mean of the values ahead under that policy.

    Values are in units of the reward. Unlike `soft_backup`, they do not subtract the KL of later
    positions: the fixed point of a KL penalty at the visited states.

    pi(a | s) proportional to ref(a | s) exp(V(s a) / beta),  V(s) = sum_a pi(a | s) V(s a)
    """
    ahead = later[successor]
    policy = tilt(probability, ahead, beta)
    return (policy * ahead).sum(-1), policy


def optimal_policy(reference: GraphPolicy, reward: Reward, beta: float) -> GraphPolicy:
    """Compute the policy that maximizes E[reward] - beta KL(policy || reference).

    1. At the end of a review the soft value is reward / beta.
    2. Go backwards, position by position, with `soft_backup`; the product of the tables is
       pi*(x) = ref(x) exp(reward / beta) / Z.

    Raises ValueError for a beta that is not above 0.

    Equation: Korbak et al. 2022 (arXiv 2205.11275, section 3).
    """
    return _backwards(reference, reward, beta, beta, soft_backup)


def loss_penalty_policy(reference: GraphPolicy, reward: Reward, beta: float) -> GraphPolicy:
    """Compute the fixed point of a KL penalty at the visited states.

    The gradient of such a penalty ignores the KL of the states that a word leads to.

    1. At the end of a review the value is the reward.
    2. Go backwards, position by position, with `mean_backup`.

    Raises ValueError for a beta that is not above 0.
    """
    return _backwards(reference, reward, beta, 1.0, partial(mean_backup, beta=beta))


def _backwards(
    reference: GraphPolicy, reward: Reward, beta: float, unit: float, backup: Callable
) -> GraphPolicy:
    _check_beta(beta)
    graph, tables = reference.graph, []
    later = torch.from_numpy(reward.score(graph.final_features()) / unit)
    for p, successor in zip(reference.probability[::-1], graph.successor[::-1], strict=True):
        later, table = backup(later, torch.from_numpy(p), torch.from_numpy(successor))
        tables.append(table.numpy())
    return GraphPolicy(graph, tuple(tables[::-1]))


def _check_beta(beta: float) -> None:
    if not beta > 0:
        raise ValueError(f"beta is {beta}. Use a KL coefficient above 0.")


def best_at_budget(solve: Callable[[float], tuple[float, float]], kl: float) -> float:
    """Compute the beta whose optimum has this KL, by bisection over the logarithm of beta.

    Args:
        solve: from beta to the reward and the KL of its optimum; the KL falls with beta.
        kl: KL budget, in nats per sequence.

    Raises ValueError if no beta between 1e-4 and 1e4 has this KL.
    """
    low, high = 1e-4, 1e4  # the KL falls from one to the other
    most, least = solve(low)[1], solve(high)[1]
    if not least <= kl <= most:
        raise ValueError(
            f"kl={kl} is out of reach. Use a budget from {least:.3g} to {most:.3g} nats."
        )
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if solve(middle)[1] > kl else (low, middle)
    return (low * high) ** 0.5


class FrontierPoint(NamedTuple):
    """One exact optimum: its expected rewards, KL in nats per sequence, and fraction of popcorn."""

    beta: float
    proxy: float
    true_reward: float
    kl_per_sequence: float
    popcorn: float


def frontier(reference: GraphPolicy, proxy: Reward, betas: Iterable[float]) -> list[FrontierPoint]:
    """Compute rewards and KL of `optimal_policy` for each beta: the highest reward at that KL.

    Raises ValueError for a beta that is not above 0.
    """
    features, chances = reference.graph.final_features(), reference.occupancy()[-1]
    figures = [proxy.score(features), true_reward.score(features), features.popcorn]
    points = []
    for beta in betas:
        best, kl = tilted(chances, figures[0], beta)
        proxy_mean, true_reward_mean, popcorn = (float(best @ figure) for figure in figures)
        points.append(FrontierPoint(beta, proxy_mean, true_reward_mean, kl, popcorn))
    return points


class BestOfNPoint(NamedTuple):
    """The exact best of n reviews: its expected rewards, and its KL in nats per sequence."""

    n: int
    proxy: float
    true_reward: float
    kl_per_sequence: float


def best_of_n(reference: GraphPolicy, proxy: Reward, numbers: Iterable[int]) -> list[BestOfNPoint]:
    """Compute the exact rewards of the best of n reviews, chosen by a proxy.

    Reviews that end in one state have the same reward, so the distribution over the final states
    has the rewards and the KL of the distribution over reviews.

    Raises ValueError for an n below 1.
    """
    features, chances = reference.graph.final_features(), torch.tensor(reference.occupancy()[-1])
    scores, true_rewards = (torch.tensor(reward.score(features)) for reward in (proxy, true_reward))
    points = []
    for n in numbers:
        best = best_of_n_distribution(chances, scores, n)
        means = (float(best @ rewards) for rewards in (scores, true_rewards))
        points.append(BestOfNPoint(n, *means, float(exact_kl(best, chances))))
    return points


def tilted(
    chances: Float[np.ndarray, " state"], scores: Float[np.ndarray, " state"], beta: float
) -> tuple[Float[np.ndarray, " state"], float]:
    """Compute the optimum's probability of every whole review, and its KL in nats per sequence.

    `tilt` applied to whole reviews. Raises ValueError for a beta that is not above 0.

    KL(pi* || ref) = E*[r] / beta - log Z
    """
    ref = torch.from_numpy(chances)
    best = tilt(ref, torch.from_numpy(scores), beta)
    return best.numpy(), float(exact_kl(best, ref))


def exact_kl(
    p: Float[Tensor, "*rows state"], ref: Float[Tensor, "*rows state"]
) -> Float[Tensor, "*rows"]:
    """Compute KL(p || ref) of each row of probabilities, in nats."""
    kl = torch.special.xlogy(p, p) - torch.special.xlogy(p, ref)
    return kl.sum(-1).clamp_min(0.0)
