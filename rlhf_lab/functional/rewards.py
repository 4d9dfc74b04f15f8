"""Reward shaping: normalize, clip and penalize rewards before they become advantages."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.functional.masks import (
    at_least_float32,
    check_mask,
    check_same_shape,
    masked_mean,
    masked_std,
)

__all__ = [
    "clip_rewards",
    "flawed_responses",
    "normalize_reward",
    "overlong_penalty",
    "penalize_responses",
    "rewards_over_labels",
]


def normalize_reward(reward: Float[Tensor, " batch"], eps: float = 1e-5) -> Float[Tensor, " batch"]:
    """Shift and scale a batch of rewards to mean 0 and standard deviation 1.

    1. Turn half-precision rewards into float32.
    2. Measure from the first reward, so that equal rewards are exactly 0 whatever rounding does.
    3. Subtract the mean of the batch.
    4. Divide by the unbiased standard deviation plus `eps` (outside the root).

    A single reward, or equal rewards, become 0.0. The textbook form, (r - r.mean()) / (r.std() +
    eps), gives nan for a single reward, and for equal rewards it divides one rounding error
    by another: 7 rewards of 1000.1 become -0.8.

    r' = (r - mean(r)) / (std(r) + eps)
    """
    reward = at_least_float32(reward)
    reward = reward - reward[:1]
    return (reward - masked_mean(reward)) / (masked_std(reward) + eps)


def clip_rewards(rewards: Float[Tensor, " batch"], limit: float) -> Float[Tensor, " batch"]:
    """Hold each reward between -limit and limit, so that one outlier cannot rule a batch.

    Raises ValueError unless limit is above 0.
    """
    if not limit > 0:
        raise ValueError(f"limit is {limit}; give a number above 0, such as 10.")
    return at_least_float32(rewards).clamp(-limit, limit)


def rewards_over_labels(
    rewards: Float[Tensor, " batch"], label_rewards: Float[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Measure each response against what the label of the same prompt earns.

    Prompts that are easy to score high on then have no head start (the scoring of torchrl's
    rollouts, which also clips it: see `clip_rewards`).

    r_i = r(x_i, y_i) - r(x_i, label_i)
    """
    check_same_shape(rewards=rewards, label_rewards=label_rewards)
    return at_least_float32(rewards) - at_least_float32(label_rewards)


def flawed_responses(
    mask: Bool[Tensor, "batch gen"],
    finished: Bool[Tensor, " batch"] | None = None,
    min_response_length: int = 0,
) -> Bool[Tensor, " batch"]:
    """Mark the responses that a rule about their length forbids, whatever they say.

    1. Mark those that did not come to an end (see `has_stop`), if `finished` is given.
    2. Mark those with fewer than `min_response_length` real tokens; the stop token counts.

    Raises ValueError if min_response_length is negative or the mask is not boolean.
    """
    check_mask(mask, mask)
    if min_response_length < 0:
        raise ValueError(
            f"min_response_length is {min_response_length}; give a number of at least 0."
        )
    check_same_shape(mask.shape[:1], finished=finished)
    too_short = mask.sum(dim=-1) < min_response_length
    return too_short if finished is None else too_short | ~finished


def penalize_responses(
    rewards: Float[Tensor, " batch"],
    flawed: Bool[Tensor, " batch"],
    reward_penalty: float,
    replace: bool = True,
) -> Float[Tensor, " batch"]:
    """Give flawed responses a fixed low reward, or take a fixed amount off their own.

    1. Where `flawed` is True, put `reward_penalty` in place of the reward.
    2. If not `replace`, add it to the reward there instead.

    Replacing leaves a good response no way to outweigh its flaw (so Ziegler et al. 2019, arXiv
    1909.08593, with -1). Raises ValueError if reward_penalty is not negative, which would be a
    prize.
    """
    if not reward_penalty < 0:
        raise ValueError(f"reward_penalty is {reward_penalty}; give a number below 0, such as -3.")
    check_same_shape(rewards=rewards, flawed=flawed)
    rewards = at_least_float32(rewards)
    return torch.where(flawed, reward_penalty if replace else rewards + reward_penalty, rewards)


def overlong_penalty(
    mask: Bool[Tensor, "batch gen"], max_len: int, buffer: int
) -> Float[Tensor, " batch"]:
    """Take more off a response, the further it goes into the last `buffer` tokens allowed to it.

    1. Count its real tokens; up to max_len - buffer of them cost nothing.
    2. From there the penalty falls in a straight line to -1 at max_len, and stays there.

    Between -1 and 0; add it to the reward. Raises ValueError unless 1 <= buffer <= max_len, or if
    the mask is not boolean.

    R(y) = 0 | ((L_max - L_cache) - |y|) / L_cache | -1   (Yu et al. 2025, DAPO, arXiv 2503.14476,
    equation 13)
    """
    if not 1 <= buffer <= max_len:
        raise ValueError(f"buffer is {buffer}; give a number from 1 to max_len={max_len}.")
    check_mask(mask, mask)
    beyond = mask.sum(dim=-1) - (max_len - buffer)
    return -(beyond.float() / buffer).clamp(0.0, 1.0)
