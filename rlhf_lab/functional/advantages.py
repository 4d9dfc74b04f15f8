"""Advantage estimation (one-step, GAE), rewards per token, returns and the value loss."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.functional.masks import (
    at_least_float32,
    check_same_shape,
    last_token_mask,
    real_entries,
    zero_masked,
)
from rlhf_lab.functional.moments import Denominator, masked_mean, masked_var


def compute_advantages(
    values: Float[Tensor, "batch gen"],
    rewards: Float[Tensor, " batch"] | Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"] | None = None,
    gamma: float = 1.0,
) -> Float[Tensor, "batch gen"]:
    """Estimate each token's advantage from one step: value of the next state minus this one.

    1. If `rewards` has one number per sequence, put it at the last real token (`token_rewards`).
    2. Start after the last token, where no reward is left: next value 0.
    3. Walk backwards over the tokens, with A_t = r_t + gamma * next value - V(s_t).
    4. After a real token, its own value becomes the next value; a masked token is stepped over.
    5. Put 0 where the mask is False.

    `values` has V of the state before each generated token (see `generated_values`); `rewards`
    has one number per sequence, or one per token.

    A_t = r_t + gamma V(s_{t+1}) - V(s_t)   (Schulman et al. 2016, GAE, arXiv 1506.02438, equation
    11: lambda = 0)
    """
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

    1. Start after the last token, where no reward is left: next value 0, next advantage 0.
    2. Walk backwards: delta_t = r_t + gamma * next value - V(s_t).
    3. A_t = delta_t + gamma * lam * next advantage.
    4. Skip masked tokens: ignore their rewards, and carry the next value and the next advantage
       over to the real token before them.
    5. Put 0 where the mask is False.

    A_t = sum_k (gamma * lam)^k delta_{t+k}   (Schulman et al. 2016, arXiv 1506.02438, equation 16)
    """
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
    """Compute the target that the value head is trained towards: advantage plus old value.

    1. Add the advantages (before any normalizing) and the values they were computed from.
    2. Put 0 where the mask is False.

    G_t = A_t + V(s_t)
    """
    check_same_shape(advantages=advantages, values=values, mask=mask)
    return zero_masked(at_least_float32(advantages) + at_least_float32(values), mask)


def explained_variance(
    values: Float[Tensor, "batch gen"],
    returns: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, ""]:
    """Compute the fraction of the returns' variance that the values explain, over real tokens.

    1 is perfect, 0 no better than a constant. 0.0 if there are no two different returns.

    EV = 1 - Var(R - V) / Var(R)
    """
    check_same_shape(values=values, returns=returns)
    real = real_entries(values, mask)  # a mask of 0 and 1 would index rows 0 and 1
    values, returns = at_least_float32(values)[real], at_least_float32(returns)[real]
    if returns.numel() < 2 or returns.min() == returns.max():
        return returns.new_zeros(())
    return 1 - masked_var(returns - values) / masked_var(returns)


def calc_value_function_loss(
    values: Float[Tensor, "batch gen"],
    returns: Float[Tensor, "batch gen"],
    vf_coef: float,
    mask: Bool[Tensor, "batch gen"] | None = None,
    old_values: Float[Tensor, "batch gen"] | None = None,
    clip: float | None = None,
    denominator: Denominator = None,
) -> Float[Tensor, ""]:
    """Average half the squared error of the values over the real tokens, times its coefficient.

    1. Blank the inputs at masked tokens.
    2. Square the distance between value and return.
    3. If `clip` is set, also square it with the value kept within `clip` of the old value, and
       take the larger of the two at each token.
    4. Average over the real tokens, and multiply by vf_coef / 2.

    The loss is subtracted from the objective. `denominator` as in `masked_mean`. Raises ValueError
    if `clip` is set without `old_values` or is negative.

    vf_coef / 2 * mean_t (V(s_t) - G_t)^2   (Schulman et al. 2017, equation 9), and with clip
    vf_coef / 2 * mean_t max((V - G)^2, (V_old + clip(V - V_old, -c, c) - G)^2)   (PPO2's code)
    """
    check_same_shape(values=values, returns=returns, old_values=old_values, mask=mask)
    values = zero_masked(at_least_float32(values), mask)
    returns = zero_masked(at_least_float32(returns), mask)
    squared_error = (values - returns).square()
    if clip is not None:
        if old_values is None or clip < 0:
            raise ValueError(
                f"clip is {clip} and old_values is {'missing' if old_values is None else 'set'}. "
                "Pass the values of the rollout and a clip of at least 0."
            )
        old_values = zero_masked(at_least_float32(old_values), mask)
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        squared_error = torch.maximum(squared_error, (clipped - returns).square())
    return 0.5 * vf_coef * masked_mean(squared_error, mask, denominator=denominator)


def token_rewards(
    rewards: Float[Tensor, " batch"] | Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"],
    kl_per_token: Float[Tensor, "batch gen"] | None = None,
    kl_coef: float | None = None,
) -> Float[Tensor, "batch gen"]:
    """Assign a sequence's reward to its last real token, and subtract the KL penalty at each one.

    Rewards per token stay at their tokens. Raises ValueError for a kl_coef without kl_per_token.

    r_t = [t = T - 1] r - kl_coef * (log pi(a_t | s_t) - log pi_ref(a_t | s_t))
    (Ziegler et al. 2019, arXiv 1909.08593, equation 2, split over the tokens)
    """
    if kl_per_token is not None and kl_coef is None:
        raise ValueError("kl_coef is missing but kl_per_token is set. Pass both or neither.")
    if kl_per_token is None and kl_coef:
        raise ValueError(f"kl_coef is {kl_coef} but kl_per_token is missing. Pass both or neither.")
    check_same_shape(mask.shape[: rewards.ndim], rewards=rewards)
    check_same_shape(mask=mask, kl_per_token=kl_per_token)
    score = at_least_float32(rewards)
    if score.ndim == 1:
        score = torch.where(last_token_mask(mask), score[:, None], 0.0)
    score = zero_masked(score, mask)
    if kl_per_token is None:
        return score
    return score - kl_coef * zero_masked(at_least_float32(kl_per_token), mask)
