"""Parts of the record on preferences: PPO on the utility of the rater."""

from typing import Any

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


def sample_metrics(policy: TransformerWithValueHead, seed: int) -> Metrics:
    """Sample a policy; returns KL to the base model, true reward and grammar."""
    args = RLHFArgs(**PPO_SETTINGS | {"batch_size": N_SAMPLES, "seed": seed + 100})
    base = load_model(BASE)
    trainer = RLHFTrainer(args, policy=policy, reference=base, reward_fn=true_reward)
    rollout = trainer.rollout_phase()
    return {
        "true_reward": rollout.raw_rewards.mean().item(),
        "KL": rollout.kl.sum(1).mean().item(),
        "grammatical": grammatical(rollout.texts).float().mean().item(),
    }


def utility_run(seed: int) -> dict[str, Any]:
    """Train PPO on the rater's utility; returns metrics of the policy, and two by phase."""
    kls: list[float] = []
    rewards: list[float] = []

    def watch(ctx: Any) -> None:
        kls.append(ctx.rollout.kl.sum(1).mean().item())
        rewards.append(true_reward(ctx.rollout.texts).mean().item())

    args = RLHFArgs(**PPO_SETTINGS | {"seed": seed, "kl_coef": BETA})
    utility = Reward("utility", sentiment_logit)
    trainer = RLHFTrainer(args, reward_fn=utility, true_reward_fn=true_reward)
    trainer.on("after_score")(watch)
    trainer.train()
    return sample_metrics(trainer.policy, seed) | {
        "KL by phase": kls,
        "true reward by phase": rewards,
    }
