"""Parts of the record on preferences: PPO on the utility of the rater."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.organism import Reward, grammatical, true_reward
from rlhf_lab.organism.rewards import sentiment_logit
from tools.course.stored_parts import RUN_SETTINGS

BASE, BETA, N_SAMPLES = "reel-nano", 4.0, 1024
PPO_SETTINGS: dict[str, Any] = {
    **RUN_SETTINGS,
    "total_phases": 12,
    "normalize_reward": False,
    "kl_coef": 0.03,
    "kl_in": "reward",
    "kl_estimator": "k1",
}
Metrics = dict[str, float]
Scorer = Callable[[Sequence[str]], Float[Tensor, " text"]]


def has_popcorn(texts: Sequence[str]) -> Bool[Tensor, " text"]:
    """Return True for each text with the word."""
    return torch.tensor(["popcorn" in text.split() for text in texts])


def sample_metrics(policy: TransformerWithValueHead, seed: int) -> Metrics:
    """Sample a policy; returns KL to the base model, true reward, grammar and popcorn."""
    args = RLHFArgs(**PPO_SETTINGS | {"batch_size": N_SAMPLES, "seed": seed + 100})
    base = load_model(BASE)
    trainer = RLHFTrainer(args, policy=policy, reference=base, reward_fn=true_reward)
    rollout = trainer.rollout_phase()
    return {
        "true_reward": rollout.raw_rewards.mean().item(),
        "KL": rollout.kl.sum(1).mean().item(),
        "grammatical": grammatical(rollout.texts).float().mean().item(),
        "popcorn": has_popcorn(rollout.texts).float().mean().item(),
    }


def train_ppo(
    reward: Scorer, seed: int, watch: Callable[[Any], None] | None = None, **fields: Any
) -> TransformerWithValueHead:
    """Train PPO on a reward; returns the last policy."""
    args = RLHFArgs(**PPO_SETTINGS | {"seed": seed} | fields)
    trainer = RLHFTrainer(args, reward_fn=reward, true_reward_fn=true_reward)
    if watch is not None:
        trainer.on("after_score")(watch)
    trainer.train()
    return trainer.policy


def utility_run(seed: int) -> dict[str, Any]:
    """Train PPO on the rater's utility; returns metrics of the policy, and two by phase."""
    kls: list[float] = []
    rewards: list[float] = []

    def watch(ctx: Any) -> None:
        kls.append(ctx.rollout.kl.sum(1).mean().item())
        rewards.append(true_reward(ctx.rollout.texts).mean().item())

    policy = train_ppo(Reward("utility", sentiment_logit), seed, watch, kl_coef=BETA)
    return sample_metrics(policy, seed) | {"KL by phase": kls, "true reward by phase": rewards}
