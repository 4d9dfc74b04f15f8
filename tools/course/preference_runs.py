"""Record on preferences: reward models of few and many pairs, and the parts of two files.

`python -m tools.course.preference_runs biased` computes one part of four.
"""

import numpy as np
import torch

from rlhf_lab.fitting import FitConfig
from rlhf_lab.models import load_model
from rlhf_lab.organism import Grammar
from rlhf_lab.rewards import RewardModel, reel_pairs
from rlhf_lab.rewards.preference_eval import judge, reading_of
from rlhf_lab.tuning import train_reward_model
from tools.course.preference_flaws import biased_runs
from tools.course.preference_policies import BASE, Metrics, utility_run
from tools.course.stored_parts import SEEDS, make_record, over_seeds

FRESH_PAIRS, FRESH_TEXTS = 1500, 500


def fit_and_judge(pairs: int, flip_rate: float, steps: int, seed: int) -> tuple:
    """Fit a reward model; returns the model, and its metrics on fresh pairs without noise."""
    model = RewardModel(load_model(BASE), seed=seed)
    config = FitConfig(steps=steps, batch_size=32, seed=seed, show_progress=False)
    train_reward_model(model, reel_pairs(round(pairs / 0.8), seed, flip_rate), config)
    fresh = reel_pairs(FRESH_PAIRS, 1000 + seed)
    gaps = model.score(fresh.chosen) - model.score(fresh.rejected)
    won = torch.ones(len(fresh), dtype=torch.bool)
    return model, judge(gaps, torch.from_numpy(fresh.true_reward_gaps), won)._asdict()


def reward_model_runs() -> dict[str, list[Metrics]]:
    """Fit to few and many pairs, with and without flipped labels."""
    return {
        f"{pairs} pairs, {rate:.0%} flipped": over_seeds(
            lambda seed, *, n=pairs, rate=rate: fit_and_judge(n, rate, 120, seed)[1]
        )
        for rate in (0.0, 0.2)
        for pairs in (64, 256, 1024)
    }


def long_runs() -> dict[str, list[Metrics]]:
    """Fit longer to more pairs; returns also the effects of edits on the score."""
    found = []
    for seed in SEEDS:
        model, metrics = fit_and_judge(4096, 0.0, 400, seed)
        texts = Grammar().sample(FRESH_TEXTS, np.random.default_rng(2000 + seed)).texts()
        edits = reading_of(model.score, texts)
        found.append(metrics | {name: change.mean().item() for name, (change, _) in edits.items()})
    return {"4096 pairs, 400 steps": found}


PARTS = {
    "reward models": reward_model_runs,
    "longer": long_runs,
    "PPO on the utility": lambda: over_seeds(utility_run),
    "biased": biased_runs,
}

if __name__ == "__main__":
    fresh = {"pairs": FRESH_PAIRS, "reviews": FRESH_TEXTS}
    make_record("preference_runs", "preference_runs", PARTS, 4, seeds=SEEDS, fresh=fresh)
