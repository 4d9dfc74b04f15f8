"""Critic initialization from a reward model."""

from pathlib import Path

import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithCritic, TransformerWithValueHead, build_policy
from rlhf_lab.models.build import in_weight_precision
from rlhf_lab.rewards.model import RewardModel, refuse_reward_model


def add_critic_from_reward_model(
    policy: TransformerWithValueHead, directory: str | Path
) -> TransformerWithCritic:
    """Add a critic whose value of a text so far is its normalized score by a reward model.

    1. Use the reward model's transformer as the critic, to be trained.
    2. Fold its head and its normalization into the value head: (w x - mean) / std.

    Raises:
        LoadError: If the directory is not a reward model.
        ConfigError: If its tokens differ from the policy's.

    Source: the value model of Stiennon et al. 2020, "Learning to summarize from human feedback".
    """
    model = RewardModel.load(directory, policy.device)
    critic, base = model.base_model.requires_grad_(True), policy.base_model
    if critic.tokenizer.get_vocab() != base.tokenizer.get_vocab():
        raise ConfigError(
            f"critic_path={str(directory)!r} has other tokens than the policy. Train a reward "
            "model with the tokenizer of base_model."
        )
    head = torch.nn.Linear(model.head.in_features, 1)
    head.weight.data.copy_(model.head.weight / model.std)
    head.bias.data.copy_(-model.mean / model.std)
    return TransformerWithCritic(base, head, critic=critic)


def load_policy_and_critic(
    args: RLHFArgs, device: str | torch.device = "cpu"
) -> TransformerWithValueHead:
    """Load the policy of the settings, with a critic from `critic_path` if it is set.

    Raises:
        LoadError: If the base model or the reward model is not found.
        ConfigError: If adapters or a critic do not fit the base model.
    """
    refuse_reward_model(args.base_model)
    policy = build_policy(args, device)
    if args.critic_path is not None:
        policy = add_critic_from_reward_model(policy, args.critic_path)
    return in_weight_precision(policy, args.weight_precision)
