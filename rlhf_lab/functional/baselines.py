"""Advantages without a value head: RLOO, GRPO, REINFORCE, REINFORCE++, ReMax, Dr. GRPO, OPO."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab.functional.advantages import compute_advantages, compute_gae
from rlhf_lab.functional.dispatch import call_by_name, check_result, look_up
from rlhf_lab.functional.masks import at_least_float32, check_mask, check_same_shape, zero_masked
from rlhf_lab.functional.moments import masked_mean, masked_std, sequence_sum, whiten


def prompt_groups(batch: int, num_samples: int) -> Int[Tensor, " batch"]:
    """Number the groups of `num_samples` consecutive responses to one prompt: 0, 0, 1, 1, ..."""
    if num_samples < 1 or batch % num_samples:
        raise ValueError(
            f"num_samples must divide the batch of {batch} sequences, got {num_samples}."
        )
    return torch.arange(batch) // num_samples


def informative_groups(
    rewards: Float[Tensor, " batch"], group: Int[Tensor, " batch"]
) -> Bool[Tensor, " batch"]:
    """Mark the sequences whose group has different rewards; estimators give the others exactly 0.0.

    Source: Yu et al. 2025, DAPO, arXiv 2503.14476, section 3.2 (dynamic sampling)
    """
    check_same_shape(rewards=rewards, group=group)
    same = group[:, None] == group[None, :]
    return (same & (rewards[:, None] != rewards[None, :])).any(dim=-1)


def rloo_advantages(
    rewards: Float[Tensor, " batch"], group: Int[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Compare each sequence with the mean reward of the other responses to the same prompt.

    1. For each sequence, find the others with the same group number.
    2. Subtract each of their rewards from its own reward.
    3. Average the differences: its reward minus the mean of the others, exact also far from 0.

    A group with equal rewards gets exactly 0.0. Raises ValueError if a group has only one sequence.

    A_i = r_i - 1 / (k - 1) * sum_{j != i} r_j
    (RLOO: Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740)
    """
    check_same_shape(rewards=rewards, group=group)
    same = group[:, None] == group[None, :]
    others = same & ~torch.eye(len(group), dtype=torch.bool, device=group.device)
    alone = (~others.any(dim=-1)).nonzero().flatten().tolist()
    if alone:
        raise ValueError(
            f"group {group[alone[0]].item()} has one sequence, but leave-one-out needs another to "
            "compare with. Sample at least 2 sequences per prompt."
        )
    advantages = masked_mean(at_least_float32(rewards)[:, None] - rewards, others, dim=-1)
    return advantages.masked_fill(~informative_groups(rewards, group), 0.0)


def grpo_advantages(
    rewards: Float[Tensor, " batch"],
    group: Int[Tensor, " batch"],
    normalize_std: bool = True,
    eps: float = 1e-4,
) -> Float[Tensor, " batch"]:
    """Compare each sequence with its whole group, in units of the group's standard deviation.

    1. For each sequence, subtract the mean reward of its group.
    2. If `normalize_std`, divide by the group's unbiased standard deviation plus `eps`.

    A group of one, or with equal rewards, gets exactly 0.0. Without the division this is the
    unbiased form of Dr. GRPO (Liu et al. 2025, arXiv 2503.20783).

    A_i = (r_i - mean(r)) / (std(r) + eps)   (Shao et al. 2024, arXiv 2402.03300, section 4.1.2)
    """
    check_same_shape(rewards=rewards, group=group)
    same = group[:, None] == group[None, :]
    rewards = at_least_float32(rewards)
    rewards = rewards - rewards[same.int().argmax(dim=-1)]  # from the first of the group
    in_group = rewards.expand(same.shape)
    advantages = rewards - masked_mean(in_group, same, dim=-1)
    if normalize_std:
        advantages = advantages / (masked_std(in_group, same, dim=-1) + eps)
    return advantages.masked_fill(~informative_groups(rewards, group), 0.0)


def dr_grpo_advantages(
    rewards: Float[Tensor, " batch"], group: Int[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Compare each sequence with the mean of its group; use it with the "constant" aggregation.

    A_i = r_i - mean(r)   (Liu et al. 2025, Dr. GRPO, arXiv 2503.20783)
    """
    return grpo_advantages(rewards, group, normalize_std=False)


def opo_advantages(
    rewards: Float[Tensor, " batch"], group: Int[Tensor, " batch"], mask: Bool[Tensor, "batch gen"]
) -> Float[Tensor, " batch"]:
    """Compare each sequence with the mean of its group, weighted by the number of real tokens.

    A group without a real token keeps its rewards.

    A_i = r_i - sum_j l_j r_j / sum_j l_j   (Hao et al. 2025, OPO, arXiv 2505.23585)
    """
    check_mask(mask, mask)
    check_same_shape(mask.shape[:1], rewards=rewards, group=group)
    rewards, same = at_least_float32(rewards), group[:, None] == group[None, :]
    first, same = same.int().argmax(dim=-1), same.to(rewards.dtype)
    lengths = mask.sum(dim=-1).to(rewards.dtype)
    tokens = same @ lengths
    rewards = rewards - torch.where(tokens > 0, rewards[first], 0.0)  # from the first of the group
    advantages = rewards - same @ (lengths * rewards) / tokens.clamp(min=1)
    return advantages.masked_fill(~informative_groups(rewards, group) & (tokens > 0), 0.0)


def rewards_to_go(
    token_rewards: Float[Tensor, "batch gen"],
    gamma: float = 1.0,
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, "batch gen"]:
    """Sum the rewards from each token on, as REINFORCE does: GAE with values 0 and lambda 1.

    G_t = sum_k gamma^k r_{t+k}   (Williams 1992)
    """
    return compute_gae(torch.zeros_like(token_rewards), token_rewards, gamma, 1.0, mask)


def remax_advantages(
    token_rewards: Float[Tensor, "batch gen"],
    greedy_rewards: Float[Tensor, " batch"],
    mask: Bool[Tensor, "batch gen"] | None = None,
) -> Float[Tensor, "batch gen"]:
    """Compare each sequence with the reward of the greedy response to the same prompt.

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
    """Whiten the rewards to go, KL penalty included, over all real tokens of the batch.

    A_t = (G_t - mean(G)) / std(G)   (Hu 2025, REINFORCE++, arXiv 2501.03262)
    """
    return whiten(rewards_to_go(token_rewards, gamma, mask), mask)


def reinforce_plus_plus_baseline_advantages(
    rewards: Float[Tensor, " batch"], group: Int[Tensor, " batch"], mask: Bool[Tensor, "batch gen"]
) -> Float[Tensor, "batch gen"]:
    """Subtract the mean of the group and whiten over all real tokens; equal rewards stay at 0.0.

    A_t = (r_i - mean_group(r) - mean) / std   (Hu 2025, REINFORCE++, arXiv 2501.03262)
    """
    check_same_shape(mask.shape[:1], rewards=rewards, group=group)
    centered = grpo_advantages(rewards, group, normalize_std=False)
    whitened = whiten(centered[:, None].expand(mask.shape), mask)
    return whitened.masked_fill(~informative_groups(rewards, group)[:, None], 0.0)


def teaching_groups(
    advantages: Float[Tensor, "batch gen"], group: Int[Tensor, " batch"]
) -> Bool[Tensor, " batch"]:
    """Mark the sequences of groups with an advantage that is not 0, from rewards or KL penalty."""
    check_same_shape((*group.shape, advantages.shape[-1]), advantages=advantages)
    same = group[:, None] == group[None, :]
    return (same & (advantages != 0).any(dim=-1)[None, :]).any(dim=-1)


def whiten_over_groups(
    advantages: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"],
    teaching: Bool[Tensor, " batch"] | None = None,
) -> Float[Tensor, "batch gen"]:
    """Whiten advantages over the real tokens of `teaching` sequences (None: all); 0 elsewhere."""
    check_same_shape(advantages=advantages, mask=mask)
    check_same_shape(mask.shape[:1], teaching=teaching)
    return whiten(advantages, mask if teaching is None else mask & teaching[:, None])


# advantage estimators by name: the values of the setting `advantages`
ADVANTAGES: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        "one_step": lambda values, token_rewards, mask=None, gamma=1.0: compute_advantages(
            values, token_rewards, mask, gamma
        ),
        "gae": compute_gae,
        "reinforce": rewards_to_go,
        "reinforce++": reinforce_plus_plus_advantages,
        "reinforce++_baseline": reinforce_plus_plus_baseline_advantages,
        "remax": remax_advantages,
        "rloo": rloo_advantages,
        "grpo": grpo_advantages,
        "dr_grpo": dr_grpo_advantages,
        "opo": opo_advantages,
    }
)


def estimate_advantages(
    estimator: str | Callable[..., Tensor],
    values: Float[Tensor, "batch gen"] | None,
    token_rewards: Float[Tensor, "batch gen"],
    mask: Bool[Tensor, "batch gen"],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    group: Int[Tensor, " batch"] | None = None,
    greedy_rewards: Float[Tensor, " batch"] | None = None,
) -> Float[Tensor, "batch gen"]:
    """Estimate advantages with an estimator of `ADVANTAGES`, or with a function.

    The function gets the arguments that its parameters name, and `rewards`, the sum over each
    sequence's real tokens (`*args`: values, rewards, mask), and returns a number per token or per
    sequence. Raises ValueError for an unknown name and for a parameter without a value.
    """
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ValueError(f"{gamma=} and {lam=} must be between 0 and 1.")
    check_same_shape(mask=mask, token_rewards=token_rewards, values=values)
    check_same_shape(mask.shape[:1], group=group, greedy_rewards=greedy_rewards)
    available = dict(values=values, token_rewards=token_rewards, mask=mask, gamma=gamma, lam=lam)
    available |= dict(group=group, greedy_rewards=greedy_rewards)
    available["rewards"] = sequence_sum(token_rewards, mask)
    function = look_up(estimator, ADVANTAGES, "advantages")
    result = call_by_name(function, available, "advantages", ("values", "rewards", "mask"))
    if isinstance(result, Tensor) and result.shape == mask.shape[:1]:
        result = result[:, None].expand(mask.shape)
    return zero_masked(check_result("advantages", result, mask.shape, "token (or sequence)"), mask)
