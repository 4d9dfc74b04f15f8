"""The maker of lesson 10's record: reward models of few and many pairs, over seeds."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_lab.fitting import FitConfig
from rlhf_lab.models import load_model
from rlhf_lab.organism import Grammar
from rlhf_lab.rewards import RewardModel, reel_pairs, train_reward_model
from rlhf_lab.rewards.preference_eval import judge, reading_of
from tools.course.preference_flaws import biased_run, ensemble_run
from tools.course.preference_policies import ARMS, adapter_run, utility_run
from tools.course.stored_parts import write_parts

RECORD = Path("rlhf_lab", "course", "records", "preference_runs.json")
SEEDS = (1, 2, 3)
BIASES = ((0.5, 120), (0.5, 400), (0.0, 400), (0.1, 400))
"""Shares of the preferred texts that end with popcorn, and steps."""
FRESH_PAIRS, FRESH_TEXTS = 1500, 500
Figures = dict[str, float]


def fitted_reward_model(
    pairs: int, flip_rate: float, steps: int, seed: int, batch_size: int = 32
) -> RewardModel:
    """A reward model after that many steps on that many pairs, besides those held out."""
    model = RewardModel(load_model("reel-nano"), seed=seed)
    fitting = FitConfig(steps=steps, batch_size=batch_size, seed=seed, show_progress=False)
    train_reward_model(model, reel_pairs(round(pairs / 0.8), seed, flip_rate), fitting)
    return model


def judged(model: RewardModel, seed: int) -> Figures:
    """How it does on fresh pairs of a rater without noise."""
    fresh = reel_pairs(FRESH_PAIRS, 1000 + seed)
    gaps = model.score(fresh.chosen) - model.score(fresh.rejected)
    won = torch.ones(len(fresh), dtype=torch.bool)
    return judge(gaps, torch.from_numpy(fresh.true_reward_gaps), won)._asdict()


def fresh_texts(seed: int) -> list[str]:
    """Reviews of the grammar that nothing was fitted to."""
    return Grammar().sample(FRESH_TEXTS, np.random.default_rng(2000 + seed)).texts()


def reward_model_runs() -> dict[str, list[Figures]]:
    """Pairs and flip rate against accuracy, order, probability and slope."""
    cells = [(pairs, rate) for rate in (0.0, 0.2) for pairs in (64, 256, 1024)]
    return {
        f"{pairs} pairs, {rate:.0%} flipped": [
            judged(fitted_reward_model(pairs, rate, 120, seed), seed) for seed in SEEDS
        ]
        for pairs, rate in cells
    }


def long_runs() -> dict[str, list[Figures]]:
    """A longer fit to more pairs: how it judges, and what it reads."""
    found = []
    for seed in SEEDS:
        model = fitted_reward_model(4096, 0.0, 400, seed)
        read = reading_of(model.score, fresh_texts(seed))
        edits = {name: change.mean().item() for name, (change, _) in read.items()}
        found.append(judged(model, seed) | edits)
    return {"4096 pairs, 400 steps": found}


def utility_runs() -> list[dict[str, Any]]:
    """PPO on the rater's utility."""
    return [utility_run(seed) for seed in SEEDS]


def adapter_runs() -> dict[str, list[Figures]]:
    """DPO through LoRA adapters of each arm."""
    return {arm: [adapter_run(arm, seed) for seed in SEEDS] for arm in ARMS}


def biased_runs() -> dict[str, list[Figures]]:
    """Reward models of pairs whose preferred texts end with popcorn more often than others."""
    return {
        f"{share:.0%}, {steps} steps": [biased_run(share, steps, seed) for seed in SEEDS]
        for share, steps in BIASES
    }


def ensemble_runs() -> list[dict[str, Any]]:
    """Ensembles of four reward models."""
    return [ensemble_run(seed) for seed in SEEDS]


PARTS: dict[str, Callable[[], Any]] = {
    "reward models": reward_model_runs,
    "longer": long_runs,
    "PPO on the utility": utility_runs,
    "adapters": adapter_runs,
    "biased": biased_runs,
    "ensembles": ensemble_runs,
}


def make_preferences(path: Path, parts: list[str]) -> None:
    """Make some parts of the record anew, as `write_parts` does, rounded to 4 digits."""
    heading = {
        "made_by": "python -m tools.course.preference_runs",
        "seeds": SEEDS,
        "fresh": {"pairs": FRESH_PAIRS, "reviews": FRESH_TEXTS},
    }
    write_parts(path, heading, PARTS, parts, digits=4)


if __name__ == "__main__":
    sys.exit(make_preferences(RECORD, sys.argv[1:]))
