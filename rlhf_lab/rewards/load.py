"""Loading a reward function by the name in RLHFArgs."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.organism.rewards import REWARDS
from rlhf_lab.rewards.model import LearnedReward
from rlhf_lab.rewards.rules import CountReward, zero
from rlhf_lab.rewards.sentiment import SentimentReward
from rlhf_lab.rewards.tokens import ScoreGains, TokenReward
from rlhf_lab.torch_modes import torch_modes_kept

RewardFn = Callable[[list[str]], Float[Tensor, " batch"]] | TokenReward


def load_reward(args: RLHFArgs, device: str | torch.device = "cpu") -> RewardFn:
    """The reward that `args.reward_fn` names.

    Raises:
        ConfigError: no reward of this name, or a classifier whose positive class is not known.
        LoadError: the model behind the sentiment or the learned reward was not found.
    """
    if args.reward_fn == "sentiment":
        return SentimentReward(
            args.reward_model, args.direction, device, positive_label=args.positive_label
        )
    if args.reward_fn == "learned":
        if args.reward_per_token:
            gains = ScoreGains(args.reward_model, device)
            return TokenReward(gains, gains.tokenizer)
        return LearnedReward(args.reward_model, device)
    if args.reward_fn.startswith("count:"):
        return CountReward(args.reward_fn.removeprefix("count:"))
    rules = {"zero": zero, **REWARDS}
    if args.reward_fn not in rules:
        raise ConfigError(
            f"reward_fn={args.reward_fn!r} is unknown; "
            f"choose sentiment, learned, count:TEXT, {', '.join(rules)}."
        )
    return rules[args.reward_fn]


def score_texts(reward_fn: RewardFn, texts: list[str]) -> Float[Tensor, " batch"]:
    """Call a reward function and refuse anything but one finite number per text.

    Raises:
        ConfigError: the function returned something else.
    """
    with torch_modes_kept():
        returned = reward_fn(list(texts))  # a list of its own, which it may change
    try:
        rewards = torch.as_tensor(returned).detach().clone()  # it may fill one tensor every time
    except (TypeError, ValueError, RuntimeError):
        rewards = None
    if rewards is None or rewards.is_complex():
        raise ConfigError(
            f"reward_fn returned {type(returned).__name__}, which is not one real number per text; "
            "return a list of numbers or a tensor."
        )
    rewards = rewards.float()
    if rewards.shape != (len(texts),):
        raise ConfigError(
            f"reward_fn returned shape {tuple(rewards.shape)} for {len(texts)} texts; "
            "return one number per text."
        )
    if not rewards.isfinite().all():
        worst = int((~rewards.isfinite()).nonzero()[0])
        raise ConfigError(
            f"reward_fn returned {rewards[worst]} for the text {texts[worst]!r}; "
            "return finite numbers."
        )
    return rewards
