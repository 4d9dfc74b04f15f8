"""Critic initialization from a reward model."""

from pathlib import Path

import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithCritic, TransformerWithValueHead, build_policy
from rlhf_lab.models.build import in_weight_precision
from rlhf_lab.models.critic import LinearValueHead
from rlhf_lab.rewards.model import RewardModel, refuse_reward_model


def add_critic_from_reward_model(
    policy: TransformerWithValueHead, directory: str | Path
) -> TransformerWithCritic:
    """The policy with a critic whose value of a text so far is what a reward model gives it.

    1. Take the reward model's transformer as critic, to be trained on.
    2. Take its head and its normalisation together as value head: (w x - mean) / std.

    Raises:
        LoadError: no reward model is there.
        ConfigError: it reads other tokens than the policy, or has another number of layers, which
        the KV cache that both share does not allow.

    Source: the value model of Stiennon et al. 2020, "Learning to summarize from human feedback".
    """
    model = RewardModel.load(directory, policy.device)
    critic, base = model.base_model.requires_grad_(True), policy.base_model
    differs = None
    if critic.tokenizer.get_vocab() != base.tokenizer.get_vocab():
        differs = "reads other tokens than the policy"
    elif critic.cfg.n_layers != base.cfg.n_layers:
        differs = f"has {critic.cfg.n_layers} layers and the policy {base.cfg.n_layers}"
    if differs is not None:
        raise ConfigError(
            f"critic_from={str(directory)!r} {differs}; train a reward model on the same "
            "base_model."
        )
    head = LinearValueHead(model.head.in_features, 1)
    head.weight.data.copy_(model.head.weight / model.std)
    head.bias.data.copy_(-model.mean / model.std)
    return TransformerWithCritic(base, head, critic=critic)


def load_policy_and_critic(
    args: RLHFArgs, device: str | torch.device = "cpu"
) -> TransformerWithValueHead:
    """The policy that the settings name, whose critic starts from `critic_from`, if that is set.

    Raises:
        LoadError: the base model or the reward model was not found.
        ConfigError: adapters or a critic that do not fit it.
    """
    refuse_reward_model(args.base_model)
    policy = build_policy(args, device)
    if args.critic_from is not None:
        policy = add_critic_from_reward_model(policy, args.critic_from)
    return in_weight_precision(policy, args.weight_precision)
