"""Reward functions by the names in `RLHFArgs.reward_fn`."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AutoConfig

from rlhf_lab.config import RLHFArgs
from rlhf_lab.config.checks import reward_names
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.load import load_pretrained
from rlhf_lab.organism.rewards import REWARDS
from rlhf_lab.organism.sums import SUMS_REWARDS
from rlhf_lab.rewards import rules
from rlhf_lab.rewards.classifiers import LogitReward, SentimentReward
from rlhf_lab.rewards.model import LearnedReward, RewardModel
from rlhf_lab.rewards.scoring import RewardFn, WeightedRewards
from rlhf_lab.rewards.tokens import ScoreGains, TokenReward

WITH_VALUES: Mapping[str, Callable[[str], RewardFn]] = {  # from the text after the colon
    "count": rules.CountReward,
    "regex": rules.RegexReward,
    "json_schema": rules.JsonSchemaReward,
    "diversity": lambda n: rules.Diversity(int(n) if n.isdecimal() else 0),
    "exact_match": lambda options: rules.ExactMatch(*options.split("+")),
}
RULES: Mapping[str, RewardFn] = {
    "zero": rules.zero,
    "exact_match": rules.ExactMatch(),
    **REWARDS,
    **SUMS_REWARDS,
}


def load_reward(args: RLHFArgs, device: str | torch.device = "cpu") -> RewardFn:
    """Load the reward that `args.reward_fn` names, or the weighted sum of several.

    Raises:
        ConfigError: If a name or the text after its colon is not valid, the number of weights
            differs, or the positive class of a classifier is not known.
        LoadError: If the model of a sentiment or learned reward was not found.
    """
    rewards = {name: _load_one(name, args, device) for name in reward_names(args.reward_fn)}
    if len(rewards) == 1 and args.reward_weights is None:
        return rewards[args.reward_fn]
    return WeightedRewards(rewards, args.reward_weights)


def resolve_custom_reward(reward_fn: Any, args: RLHFArgs) -> RewardFn:
    """Apply `args.reward_weights` to a function, a mapping or a list of functions."""
    if isinstance(reward_fn, type):
        raise ConfigError(f"reward_fn={reward_fn.__name__} is a class. Pass an object of it.")
    if isinstance(reward_fn, Mapping | list | tuple):
        return WeightedRewards(reward_fn, args.reward_weights)
    if args.reward_weights is not None:
        return WeightedRewards([reward_fn], args.reward_weights)
    return reward_fn


def _load_one(name: str, args: RLHFArgs, device: str | torch.device) -> RewardFn:
    model, label = args.reward_model, args.positive_label
    if name == "sentiment":
        if load_pretrained(AutoConfig, model, "classifier").num_labels != 1:
            return SentimentReward(model, args.direction, device, positive_label=label)
        if args.direction != "pos" or label is not None:
            raise ConfigError(
                f"reward_model={model!r} has one logit and no classes, so direction and "
                "positive_label have no effect. Set them to 'pos' and None."
            )
        return LogitReward(model, device)
    if name == "learned" and args.reward_per_token:
        gains = ScoreGains(RewardModel.load(model, device))
        return TokenReward(gains, gains.tokenizer)
    if name == "learned":
        return LearnedReward(model, device)
    kind, colon, value = name.partition(":")
    if colon and kind in WITH_VALUES:
        return WITH_VALUES[kind](value)
    if name not in RULES:
        raise ConfigError(
            f"reward_fn={name!r} is unknown. You can choose sentiment, learned, count:TEXT, "
            f"regex:PATTERN, json_schema:FILE, diversity:N, {', '.join(RULES)}, or several with "
            "commas between."
        )
    return RULES[name]
