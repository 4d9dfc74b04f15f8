"""Reading of rewards: what a reward function of any kind pays texts, responses and tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.chat import Message, assistant_turn, user_turn
from rlhf_lab.errors import ConfigError
from rlhf_lab.rewards.conversation import ConversationReward
from rlhf_lab.rewards.responses import ResponseReward
from rlhf_lab.rewards.tokens import TokenReward
from rlhf_lab.rewards.weighted import WeightedRewards, naming
from rlhf_lab.samples import Samples
from rlhf_lab.torch_modes import torch_modes_kept

RewardFn = Callable[[list[str]], Float[Tensor, " batch"]] | TokenReward
"""A reward: a function from texts to one number each, or one that pays token by token."""
NO_NAMES: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class TextBatch:
    """What rewards read of a batch.

    Args:
        texts: prompts with their responses; in a chat, the responses alone.
        prompts: the beginnings of the texts that were given, empty where None; in a chat, what the
            user said last.
        answers: the right answer to each prompt, where they are known.
        samples: the tokens, for rewards on token ids.
        turns: in a chat, its messages, of which the last is the response.
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
        """Responses to conversations that end with a user's turn."""
        asked = [turns[-1]["content"] for turns in conversations]
        pairs = zip(conversations, responses, strict=True)
        turns = [(*before, assistant_turn(response)) for before, response in pairs]
        return cls(list(responses), asked, answers, samples, turns)

    @property
    def conversations(self) -> list[Sequence[Message]]:
        """The turns; without a chat, the prompt as a user's and the response, less outer blanks.

        Raises:
            ConfigError: what the texts answer is not known.
        """
        if self.turns is not None:
            return list(self.turns)
        if self.prompts is None:
            raise ConfigError(
                "the reward, as a reward model of one logit does, reads prompt and response, and "
                "there are texts only; give what they answer (score --prompt TEXT)."
            )
        pairs = zip(self.given, self.responses, strict=True)
        return [(user_turn(a.strip()), assistant_turn(b.strip())) for a, b in pairs]

    @property
    def responses(self) -> list[str]:
        """What follows the prompts."""
        if self.turns is not None:
            return list(self.texts)
        return responses_of(self.texts, self.given)

    @property
    def given(self) -> list[str]:
        """The prompts, one per text."""
        return [""] * len(self.texts) if self.prompts is None else list(self.prompts)


@dataclass(frozen=True)
class RewardOutput:
    """What a reward function pays each text, and each token, if it pays tokens.

    Args:
        rewards: per text; the sum over its tokens, if it pays tokens.
        token_rewards: per generated token.
        by_name: what each of several rewards pays, before it is weighted.
    """

    rewards: Float[Tensor, " batch"]
    token_rewards: Float[Tensor, "batch gen"] | None = None
    by_name: Mapping[str, Float[Tensor, " batch"]] = field(default_factory=lambda: NO_NAMES)


def responses_of(texts: Sequence[str], prompts: Sequence[str]) -> list[str]:
    """What stands behind the prompt of each text."""
    return [text.removeprefix(prompt) for text, prompt in zip(texts, prompts, strict=True)]


def score_batch(reward_fn: RewardFn, written: TextBatch) -> RewardOutput:
    """What a reward function of any kind pays a batch.

    1. A function of texts, of responses or of conversations is called once, with all of them.
    2. One on token ids reads the samples; prompts are not paid.
    3. Of several, each is read so, and their weighted sum is paid.

    Raises:
        ConfigError: it returned something else than one finite number for each, it asks for
            answers or token ids that are not there; one of several is named.
    """
    if isinstance(reward_fn, WeightedRewards):
        return _read_each(reward_fn, written)
    if isinstance(reward_fn, TokenReward):
        return _read_tokens(reward_fn, written.samples)
    if isinstance(reward_fn, ResponseReward):
        read = lambda responses: reward_fn.read(written.given, responses, written.answers)
        return RewardOutput(score_texts(read, written.responses))
    if isinstance(reward_fn, ConversationReward):
        conversations = written.conversations
        return RewardOutput(score_texts(lambda texts: reward_fn.read(conversations), written.texts))
    return RewardOutput(score_texts(reward_fn, written.texts))


def _read_each(several: WeightedRewards, written: TextBatch) -> RewardOutput:
    """What each of several rewards pays, and their weighted sum."""
    outputs: dict[str, RewardOutput] = {}
    for name, reward in several.rewards.items():
        try:
            outputs[name] = score_batch(reward, written)
        except Exception as error:
            raise naming(name, error) from error.__cause__
    by_name = {name: each.rewards for name, each in outputs.items()}
    total = several.total(by_name)
    if all(each.token_rewards is None for each in outputs.values()):
        return RewardOutput(total, None, by_name)
    mask = written.samples.mask
    of_tokens = torch.zeros(mask.shape, device=mask.device)
    for name, each in outputs.items():
        tokens = each.token_rewards
        if tokens is None:  # a reward of the whole text is its last token's
            tokens = F.token_rewards(each.rewards.to(mask.device), mask)
        of_tokens = of_tokens + several.weights[name] * tokens
    return RewardOutput(total, of_tokens, by_name)


def _read_tokens(reward_fn: TokenReward, samples: Samples | None) -> RewardOutput:
    """What a reward on token ids pays the sequences and, if it does, their tokens."""
    if samples is None:
        raise ConfigError("reward_fn reads token ids, and there are texts only; hand it a run.")
    rewards = reward_fn(samples.tokens, samples.written_mask)
    if rewards.ndim == 1:
        return RewardOutput(rewards)
    of_tokens = F.zero_masked(rewards[:, samples.prefix_len :], samples.mask)
    return RewardOutput(of_tokens.sum(1), of_tokens)


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
