"""Parts of the record on preferences: PPO on the rater's utility, and DPO through LoRA adapters."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.fitting import DPOLoss, FitConfig
from rlhf_lab.functional import implicit_rewards
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.models.lora import add_lora
from rlhf_lab.organism import Grammar, Reward, grammatical, true_reward
from rlhf_lab.organism.rewards import sentiment_logit, true_log_odds
from rlhf_lab.rewards import reel_pairs
from rlhf_lab.tuning import train_on_pairs
from rlhf_lab.tuning.examples import encode_examples, text_logprobs
from tools.course.stored_parts import RUN_SETTINGS

BASE, BETA, N_SAMPLES, PROBES = "reel-nano", 4.0, 1024, 256
PPO_SETTINGS: dict[str, Any] = {
    **RUN_SETTINGS,
    "total_phases": 12,
    "normalize_reward": False,
    "kl_coef": 0.03,
    "kl_in": "reward",
    "kl_estimator": "k1",
}
ARMS: dict[str, tuple[int, Sequence[str]]] = {
    "rank 1, everywhere": (1, ("W_Q", "W_K", "W_V", "W_O", "W_in", "W_out")),
    "rank 1, query and value": (1, ("W_Q", "W_V")),
    "rank 8, query and value": (8, ("W_Q", "W_V")),
}
ADAPTER_PAIRS, ADAPTER_SCALE = 512, 8.0
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


def line_through(x: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> Metrics:
    """Fit y on x by least squares; returns slope and R2."""
    x, y = x - x.mean(), y - y.mean()
    both, spread = (x * y).mean(), x.square().mean()
    return {"slope": (both / spread).item(), "R2": (both**2 / spread / y.square().mean()).item()}


@torch.no_grad()
def implicit_line(model: HookedModel, seed: int) -> Metrics:
    """Fit a policy's implicit reward on the utility, on reviews of the grammar."""
    texts = Grammar().sample(PROBES, np.random.default_rng(2000 + seed)).texts()
    base = load_model(BASE)
    rows = encode_examples(base, [""] * len(texts), texts)
    implied = implicit_rewards(text_logprobs(model, rows), text_logprobs(base, rows), BETA)
    return line_through(torch.from_numpy(true_log_odds(texts)), implied.double())


def utility_run(seed: int) -> dict[str, Any]:
    """Train PPO on the rater's utility; returns metrics of the policy, and two by phase."""
    kls: list[float] = []
    rewards: list[float] = []

    def watch(ctx: Any) -> None:
        kls.append(ctx.rollout.kl.sum(1).mean().item())
        rewards.append(true_reward(ctx.rollout.texts).mean().item())

    policy = train_ppo(Reward("utility", sentiment_logit), seed, watch, kl_coef=BETA)
    found = sample_metrics(policy, seed) | implicit_line(policy.base_model, seed)
    return found | {"KL by phase": kls, "true reward by phase": rewards}


def adapter_run(arm: str, seed: int) -> Metrics:
    """Train DPO through the adapters of one arm; returns the metrics of the policy."""
    rank, targets = ARMS[arm]
    model: HookedModel = load_model(BASE)
    add_lora(model, rank, ADAPTER_SCALE * rank, targets, seed)
    config = FitConfig(60, 32, learning_rate=3e-3, seed=seed, show_progress=False)
    pairs = reel_pairs(round(ADAPTER_PAIRS / (1 - config.held_out)), seed)
    train_on_pairs(model, pairs, config, DPOLoss(beta=BETA))
    return sample_metrics(TransformerWithValueHead(model, seed=seed), seed)
