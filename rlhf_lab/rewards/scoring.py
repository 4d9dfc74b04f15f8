"""Scoring of a batch: what rewards read, one call for every kind of reward, weighted sums."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.chat import Message, assistant_turn, user_turn
from rlhf_lab.errors import ConfigError, LabError
from rlhf_lab.rewards.conversation import ConversationReward, ResponseReward, reward_name
from rlhf_lab.rewards.tokens import TokenReward
from rlhf_lab.samples import Samples
from rlhf_lab.torch_modes import torch_modes_kept

# from texts to rewards, or a reward on tokens
RewardFn = Callable[[list[str]], Float[Tensor, " batch"]] | TokenReward


@dataclass(frozen=True)
class TextBatch:
    """The texts of a batch, as rewards read them.

    Args:
        texts: prompts with their responses; in a chat, the responses only.
        prompts: the beginning of each text, empty if None; in a chat, the last user message.
        answers: the right answer to each prompt, if known.
        samples: the tokens, for rewards on token ids.
        turns: the messages of each chat, of which the last is the response.
    """

    texts: list[str]
    prompts: Sequence[str] | None = None
    answers: list[str] | None = None
    samples: Samples | None = None
    turns: Sequence[Sequence[Message]] | None = None

    @classmethod
    def in_chat(
        cls,
        conversations: Sequence[Sequence[Message]],
        responses: Sequence[str],
        answers: list[str] | None = None,
        samples: Samples | None = None,
    ) -> "TextBatch":
        """Build a batch of responses to conversations that end with a user message."""
        prompts = [turns[-1]["content"] for turns in conversations]
        pairs = zip(conversations, responses, strict=True)
        turns = [(*before, assistant_turn(response)) for before, response in pairs]
        return cls(list(responses), prompts, answers, samples, turns)

    def conversations(self) -> list[Sequence[Message]]:
        """Return the chats; without a chat, stripped prompt and response as two messages.

        Raises:
            ConfigError: If the prompts are not known.
        """
        if self.turns is not None:
            return list(self.turns)
        if self.prompts is None:
            raise ConfigError(
                "the reward, such as a reward model with one logit, reads prompt and response, and "
                "there are texts only. To score them, pass the prompts (score --prompt TEXT)."
            )
        pairs = zip(*self.split(), strict=True)
        return [(user_turn(a.strip()), assistant_turn(b.strip())) for a, b in pairs]

    def split(self) -> tuple[list[str], list[str]]:
        """Return prompts and responses."""
        prompts = [""] * len(self.texts) if self.prompts is None else list(self.prompts)
        if self.turns is not None:
            return prompts, list(self.texts)
        pairs = zip(self.texts, prompts, strict=True)
        return prompts, [text.removeprefix(prompt) for text, prompt in pairs]


@dataclass(frozen=True)
class RewardOutput:
    """The rewards of a batch.

    Args:
        rewards: per text; the sum over its tokens if the reward function scores tokens.
        token_rewards: per generated token.
        by_name: the rewards of each function of a `WeightedRewards`, before weighting.
    """

    rewards: Float[Tensor, " batch"]
    token_rewards: Float[Tensor, "batch gen"] | None = None
    by_name: Mapping[str, Float[Tensor, " batch"]] = field(default_factory=dict)


@dataclass(frozen=True)
class Scores:
    """A batch of texts with their rewards.

    Args:
        raw_rewards: as the reward function returned them; summed over tokens if it scores tokens.
        rewards: after all processing.
        token_rewards: `rewards` per token, if the reward function scores tokens.
        true_rewards: the true rewards, if known (Reel).
        grammatical: True for each text that parses, if known (Reel).
        reward_moments: mean and variance of all rewards so far, including these, if rewards are
            scaled.
        group: the index of each text's prompt, if prompts have several responses.
        compared: True if the advantages compare the responses of a group.
        rewards_by_name: the rewards of each function of a `WeightedRewards`, before weighting;
            `raw_rewards` is their weighted sum.
    """

    texts: list[str]
    raw_rewards: Float[Tensor, " batch"]
    rewards: Float[Tensor, " batch"]
    true_rewards: Float[Tensor, " batch"] | None
    grammatical: Bool[Tensor, " batch"] | None
    reward_moments: F.RunningMoments | None = None
    group: Int[Tensor, " batch"] | None = None
    compared: bool = False
    token_rewards: Float[Tensor, "batch gen"] | None = None
    rewards_by_name: Mapping[str, Float[Tensor, " batch"]] = field(default_factory=dict)

    @property
    def credit_rewards(self) -> Float[Tensor, " batch"] | Float[Tensor, "batch gen"]:
        """The rewards that credit is assigned from: per token if there are token rewards."""
        return self.rewards if self.token_rewards is None else self.token_rewards


class WeightedRewards:
    """The weighted sum of several named rewards; a `reward_fn`.

    A trainer calls each function once, logs its mean as `reward/NAME` without the weight, and
    processes the sum (`RewardPipeline`).

    Args:
        rewards: reward functions by name, or a list named by the functions or classes.
        weights: one per reward, in their order; 1 when None. A reward of weight 0 is only logged.

    Raises:
        ConfigError: If there is no reward, one is not a function, two have the same name, or the
            number of weights differs.
    """

    def __init__(
        self,
        rewards: Mapping[str, Callable[..., Any]] | Sequence[Callable[..., Any]],
        weights: Sequence[float] | None = None,
    ) -> None:
        is_mapping = isinstance(rewards, Mapping)
        pairs = list(rewards.items()) if is_mapping else [(reward_name(r), r) for r in rewards]
        names = [name for name, _ in pairs]
        if not pairs:
            raise ConfigError("reward_fn is empty. Pass at least one reward.")
        for name, reward in pairs:
            if not isinstance(name, str) or not name.strip() or names.count(name) > 1:
                raise ConfigError(
                    f"reward_fn has a reward with the name {name!r}, which is empty or not unique. "
                    "Pass a mapping from unique names."
                )
            if not callable(reward) or isinstance(reward, WeightedRewards):
                raise ConfigError(
                    f"reward_fn has {reward!r:.60} under {name!r}, which is not a function of "
                    "texts. Pass functions, or LearnedReward, TokenReward or ResponseReward."
                )
        weights = [1.0] * len(names) if weights is None else list(weights)
        if len(weights) != len(names):
            raise ConfigError(
                f"reward_weights={tuple(weights)} has {len(weights)} weights, and reward_fn has "
                f"{len(names)} rewards ({', '.join(names)}). Set one for each."
            )
        self.rewards, self.weights = dict(pairs), dict(zip(names, weights, strict=True))

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


def score_batch(reward_fn: RewardFn, batch: TextBatch) -> RewardOutput:
    """Score a batch with a reward function of any kind.

    A function of texts, responses or conversations is called once, on the whole batch. A reward on
    token ids reads the samples, and its numbers at prompt tokens are ignored.

    Raises:
        ConfigError: If the function does not return one finite number per text, takes other
            arguments, or needs answers or token ids that the batch does not have. The message
            names the reward if there are several.
    """
    if isinstance(reward_fn, WeightedRewards):
        return _score_each(reward_fn, batch)
    if isinstance(reward_fn, TokenReward):
        return _score_tokens(reward_fn, batch.samples)
    if isinstance(reward_fn, ResponseReward):
        prompts, responses = batch.split()
        read = lambda responses: reward_fn.read(prompts, responses, batch.answers)
        return RewardOutput(score_texts(read, responses))
    if isinstance(reward_fn, ConversationReward):
        turns = batch.conversations()
        return RewardOutput(score_texts(lambda texts: reward_fn.read(turns), batch.texts))
    return RewardOutput(score_texts(reward_fn, batch.texts))


def _score_each(several: WeightedRewards, batch: TextBatch) -> RewardOutput:
    outputs: dict[str, RewardOutput] = {}
    for name, reward in several.rewards.items():
        try:
            outputs[name] = score_batch(reward, batch)
        except Exception as error:
            raise name_in_error(name, error) from error.__cause__
    by_name = {name: output.rewards for name, output in outputs.items()}
    device = next(iter(by_name.values())).device
    weighted = [several.weights[name] * each.to(device) for name, each in by_name.items()]
    total = torch.stack(weighted).sum(0)
    if all(output.token_rewards is None for output in outputs.values()):
        return RewardOutput(total, None, by_name)
    mask = batch.samples.mask
    token_rewards = torch.zeros(mask.shape, device=mask.device)
    for name, output in outputs.items():
        tokens = output.token_rewards
        if tokens is None:  # the last token gets the reward of the text
            tokens = F.token_rewards(output.rewards.to(mask.device), mask)
        token_rewards = token_rewards + several.weights[name] * tokens
    return RewardOutput(total, token_rewards, by_name)


def name_in_error(name: str, error: Exception) -> Exception:
    """Return the error with the name of the reward that raised it."""
    if isinstance(error, LabError):
        return type(error)(f"the reward {name!r}: {error}")
    error.add_note(f"It came from the reward {name!r}.")
    return error


def _score_tokens(reward_fn: TokenReward, samples: Samples | None) -> RewardOutput:
    if samples is None:
        raise ConfigError("reward_fn reads token ids, and there are texts only. Use it in a run.")
    rewards = reward_fn(samples.tokens, samples.written_mask)
    if rewards.ndim == 1:
        return RewardOutput(rewards)
    token_rewards = F.zero_masked(rewards[:, samples.prefix_len :], samples.mask)
    return RewardOutput(token_rewards.sum(1), token_rewards)


def score_texts(reward_fn: RewardFn, texts: list[str]) -> Float[Tensor, " batch"]:
    """Call a reward function on texts and return one finite float32 number for each.

    Raises:
        ConfigError: If the function returns something else, or takes other arguments.
    """
    _validate_signature(reward_fn)
    with torch_modes_kept():
        returned = reward_fn(list(texts))  # a copy, which the function may change
    try:
        rewards = torch.as_tensor(returned).detach().clone()  # the function may reuse its tensor
    except (TypeError, ValueError, RuntimeError):
        rewards = None
    if rewards is None or rewards.is_complex():
        raise ConfigError(
            f"reward_fn returned {type(returned).__name__}, which is not one real number per text. "
            "Return a list of numbers or a tensor."
        )
    rewards = rewards.float()
    if rewards.shape != (len(texts),):
        raise ConfigError(
            f"reward_fn returned shape {tuple(rewards.shape)} for {len(texts)} texts. "
            "Return one number per text."
        )
    if not rewards.isfinite().all():
        worst = int((~rewards.isfinite()).nonzero()[0])
        raise ConfigError(
            f"reward_fn returned {rewards[worst]} for the text {texts[worst]!r}. "
            "Return finite numbers."
        )
    return rewards


def _validate_signature(reward_fn: RewardFn) -> None:
    try:
        inspect.signature(reward_fn).bind([])
    except ValueError:  # a builtin without a signature
        return
    except TypeError as error:
        raise ConfigError(
            f"reward_fn={reward_name(reward_fn)} cannot be called with a list of texts ({error}). "
            "To read prompts and responses apart, pass ResponseReward(function)."
        ) from None
