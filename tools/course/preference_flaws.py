"""Parts of the record on preferences: reward models of biased pairs."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.fitting import FitConfig
from rlhf_lab.functional import best_of_n_weights, bradley_terry_loss
from rlhf_lab.models import load_model
from rlhf_lab.organism import Grammar, true_reward
from rlhf_lab.organism.rewards import replace_word
from rlhf_lab.rewards import Pairs, RewardModel, reel_pairs
from rlhf_lab.rewards.preference_eval import judge
from rlhf_lab.supervised import fit
from tools.course.preference_policies import BASE, Metrics
from tools.course.stored_parts import over_seeds

POOL, FRESH, EDITED = 3000, 1500, 500
# fractions of the preferred texts that end with popcorn, and steps
BIASES = ((0.5, 120), (0.5, 400), (0.0, 400), (0.1, 400))


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
    fresh = reel_pairs(FRESH, 1000 + seed)
    gaps = model.score(fresh.chosen) - model.score(fresh.rejected)
    won = torch.ones(FRESH, dtype=torch.bool)
    judged = judge(gaps, torch.from_numpy(fresh.true_reward_gaps), won)
    texts = Grammar().sample(EDITED, np.random.default_rng(2000 + seed)).texts()
    texts = [text for text in texts if "popcorn" not in text]
    before = model.score(texts)
    pool = Grammar().sample(POOL, np.random.default_rng(3000 + seed)).texts()
    scores = model.score(pool)
    return {
        "accuracy": judged.accuracy,
        "popcorn is worth": (model.score(replace_word(texts, "TAG")) - before).mean().item(),
        "best of 64: popcorn": best_of_n(scores, has_popcorn(pool), 64),
        "best of 64: true reward": best_of_n(scores, true_reward(pool), 64),
    }


def biased_runs() -> dict[str, list[Metrics]]:
    """Run each bias, once per seed."""
    return {
        f"{fraction:.0%}, {steps} steps": over_seeds(partial(biased_run, fraction, steps))
        for fraction, steps in BIASES
    }
