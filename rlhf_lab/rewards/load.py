"""Loading a reward function by the name in RLHFArgs."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlhf_lab.config import RLHFArgs, reward_names
from rlhf_lab.errors import ConfigError
from rlhf_lab.organism.rewards import REWARDS
from rlhf_lab.rewards.diversity import Diversity
from rlhf_lab.rewards.json_schema import JsonSchemaReward
from rlhf_lab.rewards.logit import LogitReward, count_labels
from rlhf_lab.rewards.model import LearnedReward
from rlhf_lab.rewards.rules import CountReward, zero
from rlhf_lab.rewards.scoring import RewardFn
from rlhf_lab.rewards.sentiment import SentimentReward
from rlhf_lab.rewards.tokens import ScoreGains, TokenReward
from rlhf_lab.rewards.verifiable import ExactMatch, RegexReward
from rlhf_lab.rewards.weighted import WeightedRewards

WITH_VALUES: Mapping[str, Callable[[str], RewardFn]] = {
    "count": CountReward,
    "regex": RegexReward,
    "json_schema": JsonSchemaReward,
    "diversity": lambda n: Diversity(int(n)),
    "exact_match": lambda options: ExactMatch(*options.split("+")),
}
"""What makes a reward of the text behind its name and a colon."""
RULES: Mapping[str, RewardFn] = {"zero": zero, "exact_match": ExactMatch(), **REWARDS}


def load_reward(args: RLHFArgs, device: str | torch.device = "cpu") -> RewardFn:
    """The reward that `args.reward_fn` names, or the weighted sum of several.

    Raises:
        ConfigError: no reward of this name, one that cannot be made of what follows the name, a
            number of weights that does not fit, or a classifier whose positive class is not known.
        LoadError: the model behind the sentiment or the learned reward was not found.
    """
    names = reward_names(args.reward_fn)
    if len(names) == 1 and args.reward_weights is None:
        return _load_one(names[0], args, device)
    WeightedRewards(dict.fromkeys(names, zero), args.reward_weights)  # refused before models load
    rewards = {name: _load_one(name, args, device) for name in names}
    return WeightedRewards(rewards, args.reward_weights)


def resolve_custom_reward(reward_fn: Any, args: RLHFArgs) -> RewardFn:
    """A reward that was handed in: a function, or several in a mapping or a list, with weights.

    Raises:
        ConfigError: see `WeightedRewards`; or weights beside one, which has its own.
    """
    if isinstance(reward_fn, WeightedRewards) and args.reward_weights is not None:
        raise ConfigError(
            f"reward_weights={args.reward_weights} is for rewards without weights, and the "
            "WeightedRewards that was handed in has its own; leave reward_weights out."
        )
    if isinstance(reward_fn, Mapping | list | tuple):
        return WeightedRewards(reward_fn, args.reward_weights)
    if args.reward_weights is not None:
        return WeightedRewards([reward_fn], args.reward_weights)
    return reward_fn


def _load_logit(args: RLHFArgs, device: str | torch.device) -> LogitReward:
    """The reward model of a single logit; what is for two classes is refused."""
    if args.direction != "pos" or args.positive_label is not None:
        raise ConfigError(
            f"reward_model={args.reward_model!r} has one logit and no classes, so that direction "
            "and positive_label say nothing; leave them at 'pos' and None."
        )
    return LogitReward(args.reward_model, device)


def _load_one(name: str, args: RLHFArgs, device: str | torch.device) -> RewardFn:
    """The reward of one name."""
    if name == "sentiment" and count_labels(args.reward_model) == 1:
        return _load_logit(args, device)
    if name == "sentiment":
        return SentimentReward(
            args.reward_model, args.direction, device, positive_label=args.positive_label
        )
    if name == "learned":
        if args.reward_per_token:
            gains = ScoreGains(args.reward_model, device)
            return TokenReward(gains, gains.tokenizer)
        return LearnedReward(args.reward_model, device)
    kind, colon, value = name.partition(":")
    if colon and kind in WITH_VALUES:
        return WITH_VALUES[kind](value)
    if name not in RULES:
        raise ConfigError(
            f"reward_fn={name!r} is unknown; choose sentiment, learned, count:TEXT, regex:PATTERN, "
            f"json_schema:FILE, diversity:N, {', '.join(RULES)}, or several with commas between."
        )
    return RULES[name]
