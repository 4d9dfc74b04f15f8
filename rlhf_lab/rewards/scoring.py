"""Scoring of a batch: one call for every kind of reward, and weighted sums of rewards."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.errors import ConfigError, require_list
from rlhf_lab.rewards.conversation import ResponseReward, TextBatch, reward_name
from rlhf_lab.rewards.tokens import TokenReward
from rlhf_lab.torch_modes import torch_modes_kept

# from texts to rewards, or a reward on tokens; a new trainer calls it once on made-up texts
RewardFn = Callable[[list[str]], Float[Tensor, " batch"]] | TokenReward


@dataclass(frozen=True)
class RewardOutput:
    """The rewards of a batch, not processed."""

    rewards: Float[Tensor, " batch"]  # the sums over tokens if the reward function scores tokens
    token_rewards: Float[Tensor, "batch gen"] | None = None
    # of each function of a `WeightedRewards`, before weighting
    by_name: Mapping[str, Float[Tensor, " batch"]] = field(default_factory=dict)


@dataclass(frozen=True)
class Scores:
    """A batch of texts with their rewards."""

    texts: list[str]
    raw_rewards: Float[Tensor, " batch"]  # of a `RewardOutput`
    rewards: Float[Tensor, " batch"]  # after all processing
    true_rewards: Float[Tensor, " batch"] | None  # if known, on Reel and sums
    reward_moments: F.RunningMoments | None = None  # of all rewards so far, if they are scaled
    group: Int[Tensor, " batch"] | None = None  # the prompt's index, with several responses each
    compared: bool = False  # True if the advantages compare the responses of a group
    token_rewards: Float[Tensor, "batch gen"] | None = None  # `rewards` per token, if known
    rewards_by_name: Mapping[str, Float[Tensor, " batch"]] = field(default_factory=dict)
    # of each text by name, such as grammatical, on Reel and sums; nan where a text is not counted
    text_metrics: Mapping[str, Float[Tensor, " batch"]] = field(default_factory=dict)

    @property
    def credit_rewards(self) -> Float[Tensor, " batch"] | Float[Tensor, "batch gen"]:
        """The rewards that credit is assigned from: per token if there are token rewards."""
        return self.rewards if self.token_rewards is None else self.token_rewards


class WeightedRewards:
    """The weighted sum of several named rewards; a `reward_fn`.

    A trainer logs the mean of each as `reward/NAME` without the weight, and processes the sum.

    Args:
        rewards: reward functions by name, or a list named by the functions or classes.
        weights: one per reward, in their order; 1 when None. A reward of weight 0 is only logged.

    Raises:
        ConfigError: If there is no reward, two have the same name, one is a WeightedRewards, or the
            number of weights differs.
    """

    def __init__(
        self,
        rewards: Mapping[str, Callable[..., Any]] | Sequence[Callable[..., Any]],
        weights: Sequence[float] | None = None,
    ) -> None:
        if not isinstance(rewards, Mapping):
            by_name = {reward_name(reward): reward for reward in rewards}
            rewards = by_name if len(by_name) == len(rewards) else {}
        if not rewards or any(isinstance(each, WeightedRewards) for each in rewards.values()):
            raise ConfigError(
                "reward_fn is empty, or has two rewards of one name, or a WeightedRewards, which "
                "has its own weights. Pass a mapping from unique names to reward functions."
            )
        require_list(weights, "reward_weights=")
        weights = [1.0] * len(rewards) if weights is None else list(weights)
        if len(weights) != len(rewards):
            raise ConfigError(
                f"reward_weights={tuple(weights)} has {len(weights)} weights, and reward_fn has "
                f"{len(rewards)} rewards ({', '.join(rewards)}). Set one for each."
            )
        self.rewards, self.weights = dict(rewards), dict(zip(rewards, weights, strict=True))

    def __call__(self, texts: Sequence[str]) -> Float[Tensor, " batch"]:
        """Return the weighted sum for texts that have no prompt."""
        return score_batch(self, TextBatch(list(texts))).rewards


def split_rewards(reward_fn: Any) -> dict[str, Any]:
    """Return the rewards of a `WeightedRewards` by name, or the only reward."""
    if isinstance(reward_fn, WeightedRewards):
        return reward_fn.rewards
    return {reward_name(reward_fn): reward_fn}


def requires_answers(reward_fn: Any) -> bool:
    """Return True if a reward compares with the right answers to prompts."""
    return any(getattr(reward, "answers", False) for reward in split_rewards(reward_fn).values())


def score_batch(reward_fn: RewardFn, batch: TextBatch, field: str = "reward_fn") -> RewardOutput:
    """Score a batch with a reward function of any kind.

    A function of texts, responses or conversations is called once, on the whole batch. A reward on
    token ids reads the samples, and its numbers at prompt tokens are ignored.

    Raises:
        ConfigError: If the function does not return one finite number per text, takes other
            arguments, or needs answers or token ids that the batch does not have. The message
            names the reward if there are several.
    """
    if isinstance(reward_fn, WeightedRewards):
        return _score_sum(reward_fn, batch)
    if isinstance(reward_fn, ResponseReward):
        return RewardOutput(score_texts(lambda texts: reward_fn.read(batch), batch.texts, field))
    if not isinstance(reward_fn, TokenReward):
        return RewardOutput(score_texts(reward_fn, batch.texts, field))
    samples = batch.samples
    if samples is None:
        raise ConfigError(f"{field} reads token ids, and there are texts only. Use it in a run.")
    rewards = reward_fn(samples.tokens, samples.written_mask)
    if rewards.ndim == 1:
        return RewardOutput(rewards)
    token_rewards = F.zero_masked(rewards[:, samples.prefix_len :], samples.mask)
    return RewardOutput(token_rewards.sum(1), token_rewards)


def _score_sum(several: WeightedRewards, batch: TextBatch) -> RewardOutput:
    outputs = {
        name: score_batch(reward, batch, f"the reward {name!r}")
        for name, reward in several.rewards.items()
    }
    by_name = {name: output.rewards for name, output in outputs.items()}
    device = next(iter(by_name.values())).device
    weighted = [several.weights[name] * each.to(device) for name, each in by_name.items()]
    total = torch.stack(weighted).sum(0)
    if all(output.token_rewards is None for output in outputs.values()):
        return RewardOutput(total, None, by_name)
    mask, token_total = batch.samples.mask, 0.0
    for name, output in outputs.items():
        tokens = output.token_rewards
        if tokens is None:  # the last token gets the reward of the text
            tokens = F.token_rewards(output.rewards.to(mask.device), mask)
        token_total = token_total + several.weights[name] * tokens
    return RewardOutput(total, token_total, by_name)


def score_texts(
    reward_fn: RewardFn, texts: list[str], field: str = "reward_fn"
) -> Float[Tensor, " batch"]:
    """Call a reward function on texts and return one finite float32 number for each.

    Raises:
        ConfigError: If the function returns something else, or takes other arguments.
    """
    try:
        inspect.signature(reward_fn).bind([])
    except ValueError:  # a builtin without a signature
        pass
    except TypeError as error:
        raise ConfigError(
            f"{field}={reward_name(reward_fn)} cannot be called with a list of texts ({error}). "
            "To read prompts and responses apart, pass ResponseReward(function)."
        ) from None
    with torch_modes_kept():
        returned = reward_fn(list(texts))  # a copy, which the function may change
    try:
        rewards = torch.as_tensor(returned).detach().clone()  # the function may reuse its tensor
        got = f"shape {tuple(rewards.shape)} of {rewards.dtype}"
    except (TypeError, ValueError, RuntimeError):
        rewards, got = torch.empty(0, 0), f"{returned!r:.60}"
    if rewards.shape != (len(texts),) or rewards.is_complex():
        raise ConfigError(
            f"{field} returned {got} for {len(texts)} texts. Return one real number per text, as "
            "a list or a tensor."
        )
    rewards = rewards.float()
    if not rewards.isfinite().all():
        worst = int((~rewards.isfinite()).nonzero()[0])
        raise ConfigError(
            f"{field} returned {rewards[worst]} for the text {texts[worst]!r}. Use finite numbers."
        )
    return rewards
