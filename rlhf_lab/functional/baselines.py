"""Baselines without a value head: REINFORCE, REINFORCE++, ReMax, Dr. GRPO and OPO advantages."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.functional.advantages import compute_gae, grpo_advantages, informative_groups
from rlhf_lab.functional.masks import (
    at_least_float32,
    check_mask,
    check_same_shape,
    whiten,
    zero_masked,
)

__all__ = [
    "dr_grpo_advantages",
    "opo_advantages",
    "prompt_groups",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "remax_advantages",
    "rewards_to_go",
    "teaching_groups",
    "whiten_over_groups",
]


def prompt_groups(batch: int, num_samples: int) -> Int[Tensor, " batch"]:
    """Number the groups of a batch in which `num_samples` responses to each prompt stand together.

    1. Give the first `num_samples` sequences group 0, the next ones group 1, and so on.

    Raises ValueError unless num_samples is at least 1 and divides the batch.
    """
    if num_samples < 1 or batch % num_samples:
        raise ValueError(
            f"num_samples is {num_samples} but the batch has {batch} sequences; give a number of "
            "at least 1 that divides it."
        )
    return torch.arange(batch) // num_samples


def rewards_to_go(
    token_rewards: Float[Tensor, "batch gen"],
    gamma: float = 1.0,
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, "batch gen"]:
    """Sum the rewards from each token to the end of its sequence: REINFORCE without a baseline.

    1. Estimate advantages with every value 0 and lambda 1, which leaves the rewards alone.

    Masked tokens are stepped over. Raises ValueError unless gamma lies in [0, 1].

    G_t = sum_k gamma^k r_{t+k}   (Williams 1992)
    """
    return compute_gae(torch.zeros_like(token_rewards), token_rewards, gamma, 1.0, mask)


def remax_advantages(
    token_rewards: Float[Tensor, "batch gen"],
    greedy_rewards: Float[Tensor, " batch"],
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, "batch gen"]:
    """Compare each sequence with the reward of the greedy answer to the same prompt.

    1. Sum the rewards from each token to the end.
    2. Subtract the reward that greedy decoding earned on the prompt of that row.
    3. Put 0 where the mask is False.

    A_t = sum_k r_{t+k} - r(greedy)   (Li et al. 2023, ReMax, arXiv 2310.10505)
    """
    check_same_shape(token_rewards.shape[:1], greedy_rewards=greedy_rewards)
    baseline = at_least_float32(greedy_rewards)[:, None]
    return zero_masked(rewards_to_go(token_rewards, 1.0, mask) - baseline, mask)


def reinforce_plus_plus_advantages(
    token_rewards: Float[Tensor, "batch gen"],
    gamma: float = 1.0,
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, "batch gen"]:
    """Take the reward to go, whitened over all real tokens of the batch in place of a baseline.

    1. Sum the (discounted) rewards from each token to the end; they contain the KL per token.
    2. Whiten over the real tokens of the whole batch, whatever prompt they answer.

    Raises ValueError unless gamma lies in [0, 1].

    A_t = (G_t - mean(G)) / std(G)   (Hu 2025, REINFORCE++, arXiv 2501.03262)
    """
    return whiten(rewards_to_go(token_rewards, gamma, mask), mask)


def reinforce_plus_plus_baseline_advantages(
    rewards: Float[Tensor, " batch"], group: Int[Tensor, " batch"], mask: Bool[Tensor, "batch gen"]
) -> Float[Tensor, "batch gen"]:
    """Take the reward minus its group's mean, whitened over all real tokens of the batch.

    1. Subtract the mean reward of the group that answers the same prompt.
    2. Give that to every token of the sequence.
    3. Whiten over the real tokens of the whole batch, where GRPO would divide group by group.
    4. Put the groups with equal rewards back to exactly 0.0: where responses differ in length the
       batch's mean is not 0, and would move them by what other prompts earned.

    A_t = (r_i - mean_group(r) - mean) / std   (Hu 2025, REINFORCE++, arXiv 2501.03262; without the
    last step there)
    """
    check_same_shape(mask.shape[:1], rewards=rewards, group=group)
    rewards = at_least_float32(rewards)
    centered = grpo_advantages(rewards, group, normalize_std=False)
    whitened = whiten(centered[:, None].expand(mask.shape), mask)
    return whitened.masked_fill(~informative_groups(rewards, group)[:, None], 0.0)


def dr_grpo_advantages(
    rewards: Float[Tensor, " batch"], group: Int[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Compare each sequence with its whole group, and leave the scale of the rewards as it is.

    Dividing by the group's standard deviation would favour prompts that are almost always, or
    almost never, answered well. To be used with the "constant" aggregation.

    A_i = r_i - mean(r)   (Liu et al. 2025, Dr. GRPO, arXiv 2503.20783)
    """
    return grpo_advantages(rewards, group, normalize_std=False)


def opo_advantages(
    rewards: Float[Tensor, " batch"], group: Int[Tensor, " batch"], mask: Bool[Tensor, "batch gen"]
) -> Float[Tensor, " batch"]:
    """Compare each sequence with the mean reward of its group, where long responses count more.

    1. Weigh each reward of the group by the number of its real tokens.
    2. Subtract the weighted mean.

    A group with equal rewards gets exactly 0.0. One without a real token gets its own rewards as
    they are: there is nothing to weigh. Raises ValueError if the mask is not boolean.

    A_i = r_i - sum_j l_j r_j / sum_j l_j   (Hao et al. 2025, OPO, arXiv 2505.23585)
    """
    check_mask(mask, mask)
    check_same_shape(mask.shape[:1], rewards=rewards, group=group)
    rewards = at_least_float32(rewards)
    same = (group[:, None] == group[None, :]).to(rewards.dtype)
    lengths = mask.sum(dim=-1).to(rewards.dtype)
    tokens = same @ lengths
    advantages = rewards - same @ (lengths * rewards) / tokens.clamp(min=1)
    return advantages.masked_fill(~informative_groups(rewards, group) & (tokens > 0), 0.0)


def teaching_groups(
    advantages: Float[Tensor, "batch gen"], group: Int[Tensor, " batch"]
) -> Bool[Tensor, " batch"]:
    """Mark the sequences of whose group at least one advantage is other than 0.

    1. Find the sequences that have such an advantage.
    2. Keep all that are in one group with one of them.

    A sequence that earned just its group's mean counts with its group. With a reward alone they are
    the `informative_groups`; where rewards pay for the KL, equal scores still teach.
    """
    check_same_shape((*group.shape, advantages.shape[-1]), advantages=advantages)
    same = group[:, None] == group[None, :]
    return (same & (advantages != 0).any(dim=-1)[None, :]).any(dim=-1)


def whiten_over_groups(
    advantages: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"],
    teaching: Bool[Tensor, " batch"] | None = None,
) -> Float[Tensor, "batch gen"]:
    """Whiten advantages over the real tokens of the groups that teach; the others stay exactly 0.

    1. Leave the sequences that are not `teaching` (see `teaching_groups`) out of the mask.
    2. Whiten over what is left (see `whiten`), and put 0 elsewhere.

    A group of equal rewards says nothing of its responses. Were it whitened with the others, their
    mean would move it off 0 (all its tokens alike), and its zeros would shrink the variance that
    the others are divided by. None takes all sequences, as does a mask in which all teach, to the
    bit. Raises ValueError if the mask is not boolean or has another shape.

    A'_t = (A_t - mean(A)) / sqrt(var(A) + 1e-8) over t in T, and 0 elsewhere; T: real tokens of
    groups with an advantage other than 0
    """
    check_same_shape(advantages=advantages, mask=mask)
    check_same_shape(mask.shape[:1], teaching=teaching)
    return whiten(advantages, mask if teaching is None else mask & teaching[:, None])
