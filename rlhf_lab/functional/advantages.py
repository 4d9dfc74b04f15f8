"""Advantage estimation: one-step, GAE, RLOO, GRPO, returns, and rewards per token."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.functional.masks import (
    at_least_float32,
    check_mask,
    check_same_shape,
    last_token_mask,
    masked_mean,
    masked_std,
    masked_var,
    zero_masked,
)

__all__ = [
    "compute_advantages",
    "compute_gae",
    "compute_returns",
    "explained_variance",
    "grpo_advantages",
    "informative_groups",
    "rloo_advantages",
    "token_rewards",
]


def compute_advantages(
    values: Float[Tensor, "batch gen"],
    rewards: Float[Tensor, " batch"] | Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"] | None = None,
    gamma: float = 1.0,
) -> Float[Tensor, "batch gen"]:
    """Estimate each token's advantage from one step: what the next state is worth, minus this one.

    1. If there is one reward per sequence, pay it at the last real token (see `token_rewards`).
    2. Start behind the last token, where nothing is left to expect: next value 0.
    3. Walk backwards over the tokens, with A_t = r_t + gamma * next value - V(s_t).
    4. After a real token, its own value becomes the next value; a masked token is stepped over.
    5. Put 0 where the mask is False.

    `values` holds V of the state before each generated token (see `generated_values`); `rewards`
    has one number per sequence, or one per token. Raises ValueError unless gamma lies in [0, 1],
    and for unequal shapes. No sequence, or no token, gives an empty result.

    A_t = r_t + gamma V(s_{t+1}) - V(s_t)   (Schulman et al. 2016, GAE, arXiv 1506.02438, equation
    11: lambda = 0). With a reward only at the end and gamma = 1 that is V(s_{t+1}) - V(s_t), and
    r - V(s_{T-1}) at the last real token.
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is {gamma}; give a number from 0 to 1.")
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    paid = token_rewards(rewards, mask) if rewards.ndim == 1 else rewards
    check_same_shape(values=values, rewards=paid, mask=mask)
    if not values.numel():
        return at_least_float32(values)
    values = at_least_float32(values)
    next_value, advantages = torch.zeros_like(values[:, 0]), []
    for value, reward, real in zip(values.T.flip(0), paid.T.flip(0), mask.T.flip(0), strict=True):
        advantages.append(torch.where(real, reward + gamma * next_value - value, 0.0))
        next_value = torch.where(real, value, next_value)
    return torch.stack(advantages[::-1], dim=1)


def compute_gae(
    values: Float[Tensor, "batch gen"],
    token_rewards: Float[Tensor, "batch gen"],
    gamma: float = 1.0,
    lam: float = 0.95,
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, "batch gen"]:
    """Estimate each token's advantage as a discounted sum of the one-step errors that follow it.

    1. Start behind the last token, where nothing is left to expect: next value 0, next advantage 0.
    2. Walk backwards: delta_t = r_t + gamma * next value - V(s_t).
    3. A_t = delta_t + gamma * lam * next advantage.
    4. A masked token is stepped over: its reward is ignored, and next value and next advantage
       are carried to the real token before it.
    5. Put 0 where the mask is False.

    Raises ValueError unless gamma and lam lie in [0, 1], and for unequal shapes. No sequence, or no
    token, gives an empty result.

    A_t = sum_k (gamma * lam)^k delta_{t+k}   (Schulman et al. 2016, arXiv 1506.02438, equation 16)
    """
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}; give a number from 0 to 1.")
    check_same_shape(values=values, token_rewards=token_rewards, mask=mask)
    if not values.numel():
        return at_least_float32(values)
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    values = at_least_float32(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    advantages = []
    for t in reversed(range(values.shape[1])):
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        advantages.append(torch.where(mask[:, t], advantage, 0.0))
    return torch.stack(advantages[::-1], dim=1)


def compute_returns(
    advantages: Float[Tensor, "batch gen"],
    values: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, "batch gen"]:
    """Give the target that the value head is trained towards: advantage plus old value.

    1. Add the advantages (before any normalising) and the values they were computed from.
    2. Put 0 where the mask is False.

    R_t = A_t + V(s_t)
    """
    check_same_shape(advantages=advantages, values=values, mask=mask)
    return zero_masked(at_least_float32(advantages) + at_least_float32(values), mask)


def explained_variance(
    values: Float[Tensor, "batch gen"],
    returns: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, ""]:
    """Say how much of the returns' variance the values explain: 1 all, 0 none, below 0 harmful.

    1. Keep the real tokens.
    2. Return 0.0 if their returns are all the same (or fewer than two), as there is nothing
       to explain.
    3. Otherwise divide the variance of the error by the variance of the returns.

    Raises ValueError if the mask is not boolean or has another shape.

    EV = 1 - Var(R - V) / Var(R)
    """
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    check_same_shape(values=values, returns=returns, mask=mask)
    check_mask(values, mask)  # other numbers would be indices: rows 0 and 1, for a mask of 0 and 1
    values, returns = at_least_float32(values)[mask], at_least_float32(returns)[mask]
    if returns.numel() < 2 or returns.min() == returns.max():
        return returns.new_zeros(())
    return 1 - masked_var(returns - values) / masked_var(returns)


def token_rewards(
    rewards: Float[Tensor, " batch"] | Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"],
    kl_per_token: Float[Tensor, "batch gen"] | None = None,
    kl_coef: float = 0.0,
) -> Float[Tensor, "batch gen"]:
    """Spread a sequence's reward over its tokens: the score at the last one, KL paid at each one.

    1. Put the reward at the last real token of its row, and 0 elsewhere. Rewards of single tokens
       stay where they are.
    2. Subtract kl_coef times the KL of each real token (in nats per token).

    A row without a real token gets no reward. Raises ValueError if kl_coef is set but
    kl_per_token is missing.

    r_t = [t = T - 1] r - kl_coef * (log pi(a_t | s_t) - log pi_ref(a_t | s_t))
    (Ziegler et al. 2019, arXiv 1909.08593, equation 2, taken apart over the tokens)
    """
    if kl_per_token is None and kl_coef != 0:
        raise ValueError(f"kl_coef is {kl_coef} but kl_per_token is missing; give both or neither.")
    check_same_shape(mask.shape[: rewards.ndim], rewards=rewards)
    check_same_shape(mask=mask, kl_per_token=kl_per_token)
    score = at_least_float32(rewards)
    if score.ndim == 1:
        score = torch.where(last_token_mask(mask), score[:, None], 0.0)
    score = zero_masked(score, mask)
    if kl_per_token is None:
        return score
    return score - kl_coef * zero_masked(at_least_float32(kl_per_token), mask)


def informative_groups(
    rewards: Float[Tensor, " batch"], group: Int[Tensor, " batch"]
) -> Bool[Tensor, " batch"]:
    """Mark the sequences whose group has at least two different rewards.

    1. Compare each reward with those of its group.
    2. Keep the sequences that differ from one of them: all of a group, or none.

    In the other groups every advantage over the group is 0, and nothing is learned (dynamic
    sampling: Yu et al. 2025, DAPO, arXiv 2503.14476, section 3.2). The estimators put 0.0 there
    themselves: what rounding leaves of the mean would be divided by a standard deviation of the
    same size.
    """
    check_same_shape(rewards=rewards, group=group)
    same = group[:, None] == group[None, :]
    return (same & (rewards[:, None] != rewards[None, :])).any(dim=-1)


def rloo_advantages(
    rewards: Float[Tensor, " batch"], group: Int[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Compare each sequence with the mean reward of the others that answer the same prompt.

    1. For each sequence, find the others with the same group number.
    2. Take the mean of their rewards as the baseline.
    3. Subtract it from the sequence's own reward.

    A group with equal rewards gets exactly 0.0. Raises ValueError if a group has only one sequence.

    A_i = r_i - 1 / (k - 1) * sum_{j != i} r_j
    (RLOO: Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740)
    """
    same = group[:, None] == group[None, :]
    others = same & ~torch.eye(len(group), dtype=torch.bool, device=group.device)
    alone = (~others.any(dim=-1)).nonzero().flatten().tolist()
    if alone:
        raise ValueError(
            f"group {group[alone[0]].item()} has one sequence and leave-one-out needs another to "
            "compare with; sample at least 2 sequences per prompt."
        )
    advantages = rewards - masked_mean(rewards.expand(same.shape), others, dim=-1)
    return advantages.masked_fill(~informative_groups(rewards, group), 0.0)


def grpo_advantages(
    rewards: Float[Tensor, " batch"],
    group: Int[Tensor, " batch"],
    normalize_std: bool = True,
    eps: float = 1e-4,
) -> Float[Tensor, " batch"]:
    """Compare each sequence with its whole group, in units of the group's standard deviation.

    1. For each sequence, take the mean reward of its group, and subtract it.
    2. If `normalize_std`, divide by the group's unbiased standard deviation plus `eps`.

    A group of one, or with equal rewards, gets exactly 0.0. Without the division this is the
    unbiased form of Dr. GRPO (Liu et al. 2025, arXiv 2503.20783).

    A_i = (r_i - mean(r)) / (std(r) + eps)   (Shao et al. 2024, arXiv 2402.03300, section 4.1.2)
    """
    same = group[:, None] == group[None, :]
    in_group = rewards.expand(same.shape)
    advantages = rewards - masked_mean(in_group, same, dim=-1)
    if normalize_std:
        advantages = advantages / (masked_std(in_group, same, dim=-1) + eps)
    return advantages.masked_fill(~informative_groups(rewards, group), 0.0)
