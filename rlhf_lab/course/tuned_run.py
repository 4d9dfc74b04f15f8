"""One run of blind tuning: its hidden reward, its settings, and its metrics on fresh reviews."""

import math
import random
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.config.args import RLHFArgs
from rlhf_lab.config.presets import PRESETS
from rlhf_lab.functional import bootstrap_interval, excess_kl
from rlhf_lab.organism import (
    Grammar,
    GraphPolicy,
    build_graph,
    frontier,
    grammar_policy,
    true_reward,
)
from rlhf_lab.training import RLHFTrainer

HIDDEN = ("bag_of_adjectives", "true_reward", "ignore_negation", "smoothed", "smoothed_popcorn")
REVIEWS = 1536  # the budget of total_phases times batch_size
FRESH_REVIEWS = 512  # on which the trained policy is evaluated
FRESH_SEED = 1000  # no run trains with it
TUNING_SETTINGS: MappingProxyType[str, Any] = MappingProxyType(
    {
        "preset": "reel",
        "num_minibatches": 4,
        "kl_in": "reward",
        "kl_estimator": "k1",
        "normalize_reward": False,
        "target_kl": 0.02,
    }
)
# the four fields of the preset reel, with as many phases as the budget allows
PRESET_FIELDS: MappingProxyType[str, Any] = MappingProxyType(
    {name: PRESETS["reel"][name] for name in ("kl_coef", "base_lr", "batch_size")}
    | {"total_phases": REVIEWS // PRESETS["reel"]["batch_size"]}
)


def normalize_name(name: str) -> str:
    """Return a name in lower case with single spaces."""
    return " ".join(name.casefold().split())


def hidden_reward(name: str) -> str:
    """Choose one of `HIDDEN`, with a name as the seed: the same for each spelling of it."""
    return random.Random(normalize_name(name)).choice(HIDDEN)


def tuned_figures(reward_fn: str, fields: Mapping[str, Any], seed: int = 1) -> dict[str, Any]:
    """Train once, and return reward, true reward with its interval, KL and excess KL.

    Raises:
        ConfigError: If a field is invalid.
        RunError: If training diverges.
    """
    settings = {**TUNING_SETTINGS, **fields, "reward_fn": reward_fn, "seed": seed}
    trained = RLHFTrainer(RLHFArgs(**settings))
    trained.train()
    fresh = RLHFTrainer(
        RLHFArgs(**settings | {"batch_size": FRESH_REVIEWS, "seed": FRESH_SEED}),
        policy=trained.policy,
        reference=trained.reference,
    ).rollout_phase()
    true_rewards = true_reward(fresh.texts)
    interval = bootstrap_interval(true_rewards, resamples=400)
    kl = fresh.kl.sum(1).mean().item()
    excess = excess_kl(true_rewards.mean().item(), kl, *true_reward_frontier())
    return {
        "reward": fresh.raw_rewards.mean().item(),
        "true_reward": true_rewards.mean().item(),
        "true_reward_low": interval.low.item(),
        "true_reward_high": interval.high.item(),
        "kl": kl,
        "excess_kl": None if math.isnan(excess) else excess,
    }


@cache
def reference_policy() -> GraphPolicy:
    """Return the grammar as a policy."""
    return grammar_policy(build_graph(Grammar()))


@cache
def true_reward_frontier() -> tuple[Float[Tensor, " point"], Float[Tensor, " point"]]:
    """Return true reward and KL of the policies with the least KL, starting at the reference."""
    points = frontier(reference_policy(), true_reward, [1e4 * 0.8**k for k in range(70)])
    columns = zip(*((point.true_reward, point.kl_per_sequence) for point in points), strict=True)
    return tuple(torch.tensor(column, dtype=torch.float64) for column in columns)
