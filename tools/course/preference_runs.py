"""Record on preferences: reward models of few, many and biased pairs, and PPO on the utility."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.fitting import FitConfig
from rlhf_lab.functional import best_of_n_weights, bradley_terry_loss
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.organism import Grammar, Reward, grammatical, true_reward
from rlhf_lab.organism.rewards import replace_word, sentiment_logit
from rlhf_lab.rewards import Pairs, RewardModel, reel_pairs
from rlhf_lab.rewards.preference_eval import Judgement, judge, reading_of
from rlhf_lab.supervised import fit
from rlhf_lab.tuning import train_reward_model
from tools.course.record import RUN_SETTINGS, SEEDS, over_seeds

FRESH_PAIRS, FRESH_TEXTS, POOL = 1500, 500, 3000
# pairs, fraction of flipped labels, and steps
FITS = {
    f"{pairs} pairs, {rate:.0%} flipped": (pairs, rate, 120)
    for rate in (0.0, 0.2)
    for pairs in (64, 256, 1024)
}
# fractions of the preferred texts that end with popcorn, and steps
BIASES = {
    f"{fraction:.0%}, {steps} steps": (fraction, steps)
    for fraction, steps in ((0.5, 120), (0.5, 400), (0.0, 400), (0.1, 400))
}
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


def judge_fresh_pairs(model: RewardModel, seed: int) -> Judgement:
    """Judge a reward model on fresh pairs without noise."""
    fresh = reel_pairs(FRESH_PAIRS, 1000 + seed)
    gaps = model.score(fresh.chosen) - model.score(fresh.rejected)
    won = torch.ones(len(fresh), dtype=torch.bool)
    return judge(gaps, torch.from_numpy(fresh.true_reward_gaps), won)


def fit_and_judge(pairs: int, flip_rate: float, steps: int, seed: int) -> tuple:
    """Fit a reward model; returns the model, and its metrics on fresh pairs without noise."""
    model = RewardModel(load_model(BASE), seed=seed)
    config = FitConfig(steps=steps, batch_size=32, seed=seed, show_progress=False)
    train_reward_model(model, reel_pairs(round(pairs / 0.8), seed, flip_rate), config)
    return model, judge_fresh_pairs(model, seed)._asdict()


def long_run(seed: int) -> Metrics:
    """Fit longer to more pairs; returns also the effects of edits on the score."""
    model, metrics = fit_and_judge(4096, 0.0, 400, seed)
    texts = Grammar().sample(FRESH_TEXTS, np.random.default_rng(2000 + seed)).texts()
    edits = reading_of(model.score, texts)
    return metrics | {name: change.mean().item() for name, (change, _) in edits.items()}


def fit_reward_model(pairs: Pairs, seed: int, steps: int = 120) -> RewardModel:
    """Fit a reward model to all pairs; the seed sets head and batches."""
    model, rng = RewardModel(load_model(BASE), seed=seed), np.random.default_rng(seed)
    both = pairs.chosen + pairs.rejected
    tokens, real = model.encode(both)

    def batch_loss() -> Float[Tensor, ""]:
        rows = rng.choice(len(pairs), 32, replace=False)
        of_batch = np.concatenate([rows, rows + len(pairs)])
        return bradley_terry_loss(*model(tokens[of_batch], real[of_batch]).chunk(2))

    fit(model, batch_loss, steps, FitConfig.learning_rate, "reward model", False)
    model.set_normalization(model.score(both))
    return model.requires_grad_(False)


def has_popcorn(texts: Sequence[str]) -> Bool[Tensor, " text"]:
    """Return True for each text with the word."""
    return torch.tensor(["popcorn" in text.split() for text in texts])


def best_of_n(scores: Float[Tensor, " text"], metric: Float[Tensor, " text"], n: int) -> float:
    """Compute the expected metric of the best of n texts of a pool by a score."""
    return (best_of_n_weights(scores.double()[None], n) * metric.double()).sum().item()


def with_popcorn(pairs: Pairs, fraction: float, rng: np.random.Generator) -> Pairs:
    """Replace the tag of a fraction of the preferred texts by popcorn."""
    put, edited = rng.random(len(pairs)) < fraction, replace_word(pairs.chosen, "TAG")
    chosen = [new if now else old for new, old, now in zip(edited, pairs.chosen, put, strict=True)]
    return Pairs(chosen, pairs.rejected)


def biased_run(fraction: float, steps: int, seed: int) -> Metrics:
    """Fit a reward model to 1,024 biased pairs; returns accuracy, popcorn and best-of-n."""
    pairs = with_popcorn(reel_pairs(1024, seed), fraction, np.random.default_rng(seed))
    model = fit_reward_model(pairs, seed, steps)
    texts = Grammar().sample(FRESH_TEXTS, np.random.default_rng(2000 + seed)).texts()
    texts = [text for text in texts if "popcorn" not in text]
    before = model.score(texts)
    pool = Grammar().sample(POOL, np.random.default_rng(3000 + seed)).texts()
    scores = model.score(pool)
    return {
        "accuracy": judge_fresh_pairs(model, seed).accuracy,
        "popcorn is worth": (model.score(replace_word(texts, "TAG")) - before).mean().item(),
        "best of 64: popcorn": best_of_n(scores, has_popcorn(pool), 64),
        "best of 64: true reward": best_of_n(scores, true_reward(pool), 64),
    }


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


PARTS = {
    "reward models": lambda: over_seeds(
        lambda kind, seed: fit_and_judge(*FITS[kind], seed)[1], *FITS
    ),
    "longer": lambda: {"4096 pairs, 400 steps": over_seeds(long_run)},
    "PPO on the utility": lambda: over_seeds(utility_run),
    "biased": lambda: over_seeds(lambda kind, seed: biased_run(*BIASES[kind], seed), *BIASES),
}
HEADING = {"seeds": SEEDS, "fresh": {"pairs": FRESH_PAIRS, "reviews": FRESH_TEXTS}}
