"""Reward shaping: normalize, clip and penalize rewards before they become advantages."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.functional.masks import at_least_float32, check_mask, check_same_shape
from rlhf_lab.functional.moments import masked_mean, masked_std


def normalize_reward(reward: Float[Tensor, " batch"], eps: float = 1e-5) -> Float[Tensor, " batch"]:
    """Shift and scale a batch of rewards to mean 0 and standard deviation 1.

    1. Turn half-precision rewards into float32.
    2. Measure from the first reward; equal rewards are then exactly 0, without rounding errors.
    3. Subtract the mean of the batch.
    4. Divide by the unbiased standard deviation plus `eps` (outside the root).

    A single reward, or equal rewards, become 0.0. The textbook form gives nan for a single reward,
    and divides one rounding error by another for equal rewards: 7 rewards of 1000.1 become -0.8.

    r' = (r - mean(r)) / (std(r) + eps)
    """
    if reward.ndim != 1:
        raise ValueError(f"reward must be [batch], got {tuple(reward.shape)}. Pass one per sample.")
    reward = at_least_float32(reward)
    reward = reward - reward[:1]
    return (reward - masked_mean(reward)) / (masked_std(reward) + eps)


def clip_rewards(rewards: Float[Tensor, " batch"], limit: float) -> Float[Tensor, " batch"]:
    """Clip each reward to between -limit and limit, to bound the effect of an outlier."""
    if not limit >= 0:
        raise ValueError(f"limit must be at least 0, got {limit}. Pass the largest size allowed.")
    return at_least_float32(rewards).clamp(-limit, limit)


def rewards_over_labels(
    rewards: Float[Tensor, " batch"], label_rewards: Float[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Subtract the reward of the label of the same prompt.

    r_i = r(x_i, y_i) - r(x_i, label_i)   (torchrl's rollouts, which also clip: see `clip_rewards`)
    """
    check_same_shape(rewards=rewards, label_rewards=label_rewards)
    return at_least_float32(rewards) - at_least_float32(label_rewards)


def flawed_responses(
    mask: Bool[Tensor, "batch gen"],
    finished: Bool[Tensor, " batch"] | None = None,
    min_response_length: int = 0,
) -> Bool[Tensor, " batch"]:
    """Mark the responses that are not finished (see `has_stop`) or too short in real tokens."""
    check_mask(mask, mask)
    check_same_shape(mask.shape[:1], finished=finished)
    too_short = mask.sum(dim=-1) < min_response_length
    return too_short if finished is None else too_short | ~finished


def penalize_responses(
    rewards: Float[Tensor, " batch"],
    flawed: Bool[Tensor, " batch"],
    reward_penalty: float,
    replace: bool = True,
) -> Float[Tensor, " batch"]:
    """Set the reward of flawed responses to `reward_penalty`, or add it if not `replace`.

    Source: Ziegler et al. 2019, arXiv 1909.08593, with -1
    """
    check_same_shape(rewards=rewards, flawed=flawed)
    rewards = at_least_float32(rewards)
    return torch.where(flawed, reward_penalty if replace else rewards + reward_penalty, rewards)


def overlong_penalty(
    mask: Bool[Tensor, "batch gen"], max_len: int, buffer: int
) -> Float[Tensor, " batch"]:
    """Compute a penalty that falls linearly from 0 to -1 over the last `buffer` allowed tokens.

    Raises ValueError unless 1 <= buffer <= max_len.

    R(y) = 0 | ((L_max - L_cache) - |y|) / L_cache | -1   (Yu et al. 2025, DAPO, arXiv 2503.14476,
    equation 13)
    """
    if not 1 <= buffer <= max_len:
        raise ValueError(f"buffer must be between 1 and max_len={max_len}, got {buffer}.")
    check_mask(mask, mask)
    beyond = mask.sum(dim=-1) - (max_len - buffer)
    return -(beyond.float() / buffer).clamp(0.0, 1.0)
