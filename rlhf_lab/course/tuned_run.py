"""One run of blind tuning: its hidden reward, the check of its four fields, and what it reaches."""

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
from rlhf_lab.course.leaderboard import plain_name
from rlhf_lab.errors import ConfigError
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
"""The rewards that one is drawn from; all have a spread, unlike `length`."""
REVIEWS = 1536
"""The budget: total_phases times batch_size may not be larger."""
FRESH_REVIEWS = 512
"""Reviews that the trained policy is judged on."""
FRESH_SEED = 1000
"""Of the generator that draws them, which no run trains with."""
TRUE_REWARD_TO_REACH = 0.9
"""Runs that reach this true reward stand above those that do not."""
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
PRESET_FIELDS: MappingProxyType[str, Any] = MappingProxyType(
    {name: PRESETS["reel"][name] for name in ("kl_coef", "base_lr", "batch_size")}
    | {"total_phases": REVIEWS // PRESETS["reel"]["batch_size"]}
)
"""The four fields as the preset reel has them, with as many phases as the budget allows."""


class UnfitFields(ConfigError):
    """Ends a notebook's cell at a field or a name that cannot be used; shown as one line."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def hidden_reward(name: str) -> str:
    """Draw one of `HIDDEN`, with a name as the seed: the same one for each way to write it."""
    return random.Random(plain_name(name)).choice(HIDDEN)


def check_fields(fields: Mapping[str, Any]) -> None:
    """Refuse four fields that no run can have.

    Raises:
        UnfitFields: a field is of the wrong kind or outside its range, or the product of phases
            and batch is above the budget.
    """
    for name, is_fit, says in (
        ("kl_coef", lambda value: value >= 0, "0 or greater"),
        ("base_lr", lambda value: value > 0, "above 0"),
    ):
        value = fields[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not is_fit(value):
            raise UnfitFields(f"{name} is {value!r:.60}; give a number that is {says}.")
    for name in ("total_phases", "batch_size"):
        value = fields[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnfitFields(f"{name} is {value!r:.60}; give a whole number of 1 or more.")
    minibatches = TUNING_SETTINGS["num_minibatches"]
    if fields["batch_size"] % minibatches:
        raise UnfitFields(
            f"batch_size is {fields['batch_size']}; give a multiple of {minibatches}, the number "
            "of minibatches."
        )
    asked = fields["total_phases"] * fields["batch_size"]
    if asked > REVIEWS:
        raise UnfitFields(
            f"total_phases * batch_size is {asked}; lower one of them: the budget is {REVIEWS} "
            "reviews."
        )


def tuned_figures(reward_fn: str, fields: Mapping[str, Any], seed: int = 1) -> dict[str, Any]:
    """Train once; reward, the true reward with its interval, KL and excess KL of fresh reviews.

    Raises:
        ConfigError, RunError: as the trainer does.
    """
    settings = {**TUNING_SETTINGS, **fields, "reward_fn": reward_fn, "seed": seed}
    trained = RLHFTrainer(RLHFArgs(**settings))
    trained.train()
    judged = RLHFTrainer(
        RLHFArgs(**settings | {"batch_size": FRESH_REVIEWS, "seed": FRESH_SEED}),
        policy=trained.policy,
        reference=trained.reference,
    ).rollout_phase()
    true_rewards = true_reward(judged.texts)
    of_true_reward = bootstrap_interval(true_rewards, resamples=400)
    kl = judged.kl.sum(1).mean().item()
    excess = excess_kl(true_rewards.mean().item(), kl, *true_reward_frontier())
    return {
        "reward": judged.raw_rewards.mean().item(),
        "true_reward": true_rewards.mean().item(),
        "true_reward_low": of_true_reward.low.item(),
        "true_reward_high": of_true_reward.high.item(),
        "kl": kl,
        "excess_kl": None if math.isnan(excess) else excess,
    }


@cache
def reference_policy() -> GraphPolicy:
    """The grammar as a policy, which is built once."""
    return grammar_policy(build_graph(Grammar()))


@cache
def true_reward_frontier() -> tuple[Float[Tensor, " point"], Float[Tensor, " point"]]:
    """The true reward and KL of the cheapest policies, from the reference on."""
    points = frontier(reference_policy(), true_reward, [1e4 * 0.8**k for k in range(70)])
    return (
        torch.tensor([point.true_reward for point in points], dtype=torch.float64),
        torch.tensor([point.kl_per_sequence for point in points], dtype=torch.float64),
    )
