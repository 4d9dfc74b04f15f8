"""Weighted sum of several rewards, each known by its name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.errors import ConfigError, LabError


class WeightedRewards:
    """Several rewards by name, of which the weighted sum is paid; a `reward_fn`.

    A trainer reads each of them once, logs the mean of each as `reward/NAME`, not multiplied by its
    weight, and does to the sum whatever the settings ask for (`RewardPipeline`).

    Args:
        rewards: reward functions by name, or in a list, where each has its function's or class's
            name.
        weights: what each is multiplied by, in their order; 1 when None. One of weight 0 is logged
            and not paid.

    Raises:
        ConfigError: no reward, one that is no function, a name that is not unique, or a number of
            weights that does not fit.
    """

    def __init__(
        self,
        rewards: Mapping[str, Callable[..., Any]] | Sequence[Callable[..., Any]],
        weights: Sequence[float] | None = None,
    ) -> None:
        pairs = (
            list(rewards.items())
            if isinstance(rewards, Mapping)
            else [(reward_name(reward), reward) for reward in rewards]
        )
        if not pairs:
            raise ConfigError("reward_fn is empty; give at least one reward.")
        names = [name for name, _ in pairs]
        for name, reward in pairs:
            if not isinstance(name, str) or not name.strip():
                raise ConfigError(f"reward_fn names a reward {name!r}; name it with a text.")
            if not callable(reward) or isinstance(reward, WeightedRewards):
                raise ConfigError(
                    f"reward_fn has {reward!r:.60} under {name!r}, which is no function of texts; "
                    "give functions, or LearnedReward, TokenReward or ResponseReward."
                )
            if names.count(name) > 1:
                raise ConfigError(
                    f"reward_fn has two rewards of the name {name!r}; give a mapping from names of "
                    "your own."
                )
        weights = [1.0] * len(names) if weights is None else list(weights)
        if len(weights) != len(names):
            raise ConfigError(
                f"reward_weights={tuple(weights)} has {len(weights)} weights, and reward_fn has "
                f"{len(names)} rewards ({', '.join(names)}); give one for each."
            )
        self.rewards, self.weights = dict(pairs), dict(zip(names, weights, strict=True))

    def total(self, by_name: Mapping[str, Float[Tensor, " batch"]]) -> Float[Tensor, " batch"]:
        """The weighted sum of what each reward pays, on the device of the first."""
        parts = [weight * by_name[name] for name, weight in self.weights.items()]
        return torch.stack([part.to(parts[0].device) for part in parts]).sum(0)

    def __call__(self, texts: Sequence[str]) -> Float[Tensor, " batch"]:
        """The weighted sum for texts that answer to no prompt."""
        from rlhf_lab.rewards.scoring import TextBatch, score_batch

        return score_batch(self, TextBatch(list(texts))).rewards


def split_rewards(reward_fn: Any) -> dict[str, Any]:
    """The rewards by name in a reward function: one, or those of which the sum is paid."""
    if isinstance(reward_fn, WeightedRewards):
        return reward_fn.rewards
    return {reward_name(reward_fn): reward_fn}


def requires_answers(reward_fn: Any) -> bool:
    """Whether a reward function, or one of several, compares with the right answers to prompts."""
    return any(getattr(reward, "answers", False) for reward in split_rewards(reward_fn).values())


def reward_name(reward_fn: Any) -> str:
    """What a reward function is called where it was given no name: as its function or its class."""
    return getattr(reward_fn, "__name__", type(reward_fn).__name__)


def naming(name: str, error: Exception) -> Exception:
    """An error with the name of the reward that it came from."""
    if isinstance(error, LabError):
        return type(error)(f"the reward {name!r}: {error}")
    error.add_note(f"It came from the reward {name!r}.")
    return error
