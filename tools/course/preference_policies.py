"""Parts of lesson 10's record: PPO on the rater's utility, and DPO through LoRA adapters."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
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
from tools.course.run_settings import RUN_SETTINGS

BASE, BETA, JUDGED_TEXTS, PROBES = "reel-nano", 4.0, 1024, 256
PPO_SETTINGS: dict[str, Any] = {
    **RUN_SETTINGS,
    "total_phases": 12,
    "normalize_reward": False,
    "kl_coef": 0.03,
    "kl_in": "reward",
    "kl_estimator": "k1",
}
"""Those of the lesson."""
ARMS: dict[str, tuple[int, Sequence[str]]] = {
    "rank 1, everywhere": (1, ("W_Q", "W_K", "W_V", "W_O", "W_in", "W_out")),
    "rank 1, query and value": (1, ("W_Q", "W_V")),
    "rank 8, query and value": (8, ("W_Q", "W_V")),
}
ADAPTER_PAIRS, ADAPTER_SCALE = 512, 8.0
Figures = dict[str, float]


def written_figures(model: HookedModel, seed: int) -> Figures:
    """KL, true reward and grammar of texts that a policy writes."""
    settings = PPO_SETTINGS | {"batch_size": JUDGED_TEXTS, "seed": seed + 100}
    policy, base = TransformerWithValueHead(model, seed=seed), load_model(BASE)
    judged = RLHFTrainer(RLHFArgs(**settings), policy=policy, reference=base, reward_fn=true_reward)
    texts = judged.rollout_phase()
    return {
        "KL": texts.kl.sum(1).mean().item(),
        "true_reward": texts.raw_rewards.mean().item(),
        "grammatical": grammatical(texts.texts).float().mean().item(),
    }


def line_through(x: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> Figures:
    """Slope of y on x by least squares, and R2."""
    x, y = x - x.mean(), y - y.mean()
    both, spread = (x * y).mean(), x.square().mean()
    return {"slope": (both / spread).item(), "R2": (both**2 / spread / y.square().mean()).item()}


@torch.no_grad()
def implicit_line(model: HookedModel, seed: int) -> Figures:
    """Slope and R2 of a policy's implicit reward on the utility, on reviews of the grammar."""
    texts = Grammar().sample(PROBES, np.random.default_rng(2000 + seed)).texts()
    base = load_model(BASE)
    rows = encode_examples(base, [""] * len(texts), texts)
    implied = implicit_rewards(text_logprobs(model, rows), text_logprobs(base, rows), BETA)
    return line_through(torch.from_numpy(true_log_odds(texts)), implied.double())


def utility_run(seed: int) -> dict[str, Any]:
    """PPO on the rater's utility: KL and true reward by phase, and what the last policy writes."""
    utility = Reward("utility", sentiment_logit)
    args = RLHFArgs(**PPO_SETTINGS | {"kl_coef": BETA, "seed": seed})
    trainer = RLHFTrainer(args, reward_fn=utility, true_reward_fn=true_reward)
    reports = trainer.train()
    path = {
        "KL by phase": [report.kl_per_sequence for report in reports],
        "true reward by phase": [report.true_reward for report in reports],
    }
    model = trainer.policy.base_model
    return written_figures(model, seed) | implicit_line(model, seed) | path


def adapter_run(arm: str, seed: int) -> Figures:
    """DPO through the adapters of one arm: what the policy writes."""
    rank, targets = ARMS[arm]
    model = load_model(BASE)
    add_lora(model, rank, ADAPTER_SCALE * rank, targets, seed)
    fitting = FitConfig(60, 32, learning_rate=3e-3, seed=seed, show_progress=False)
    pairs = reel_pairs(round(ADAPTER_PAIRS / (1 - fitting.held_out)), seed)
    train_on_pairs(model, pairs, fitting, DPOLoss(beta=BETA))
    return written_figures(model, seed)
