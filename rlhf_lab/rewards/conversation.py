"""Rewards that read prompt and response apart, or whole conversations, and responses as text."""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_lab.chat import Message
from rlhf_lab.errors import ConfigError
from rlhf_lab.samples import Samples


def reward_name(reward_fn: Any) -> str:
    """Return the name of a reward's function or class."""
    return getattr(reward_fn, "__name__", type(reward_fn).__name__)


class ResponseReward:
    """A `reward_fn` that reads prompts and responses apart.

    Args:
        function: from a list of prompts and a list of responses to one number each; with
            `answers=True` it also gets the list of right answers.
        answers: True if the function reads the right answers, which are in the column
            `answers_column` of the prompts file.
        whole_batch: True if the reward of a response depends on the other responses. The function
            is then only called on whole batches, and settings that score a part are rejected.
    """

    def __init__(
        self, function: Callable[..., Any], *, answers: bool = False, whole_batch: bool = False
    ) -> None:
        if not callable(function):
            raise ConfigError(
                f"ResponseReward({function!r:.60}) has no function. Pass a function from prompts "
                "and responses to one number each."
            )
        self.function, self.answers, self.whole_batch = function, answers, whole_batch

    @property
    def __name__(self) -> str:
        return reward_name(self.function)

    def read(
        self, prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str] | None
    ) -> Any:
        """Call the function and return its result, not validated.

        Raises:
            ConfigError: If the function reads answers, which are missing.
        """
        if not self.answers:
            return self.function(list(prompts), list(responses))
        if answers is None:
            raise ConfigError(
                f"the reward {self.__name__} compares with the right answers, which are "
                "not known. To add them, set answers_column to a column of the prompts file."
            )
        return self.function(list(prompts), list(responses), list(answers))

    def __call__(self, texts: Sequence[str]) -> Any:
        """Score texts that have no prompt."""
        return self.read([""] * len(texts), texts, None)


class ConversationReward:
    """A `reward_fn` that reads whole conversations.

    Args:
        function: from a list of conversations to one number each. A conversation is a list of
            messages with role and content, of which the last is the response. Without a chat, it
            is the prompt as a user message, and the response.
    """

    def __init__(self, function: Callable[[list[list[Message]]], Any]) -> None:
        self.function = function

    @property
    def __name__(self) -> str:
        return reward_name(self.function)

    def read(self, conversations: Sequence[Sequence[Message]]) -> Any:
        """Call the function and return its result, not validated."""
        return self.function([list(turns) for turns in conversations])

    def __call__(self, texts: Sequence[str]) -> Any:
        """Raise ConfigError: the prompts of the texts are not known."""
        raise ConfigError(
            f"the reward {self.__name__} reads prompt and response, and there are texts only. "
            "Use it in a run, or pass the prompts (score --prompt TEXT)."
        )


def chat_answers(
    samples: Samples, tokenizer: PreTrainedTokenizerBase, stop_tokens: Sequence[int]
) -> list[str]:
    """Decode the responses of samples, without special tokens and the final stop token."""
    tokens = samples.tokens[:, samples.prefix_len :].tolist()
    real = samples.written_mask[:, samples.prefix_len :].tolist()
    rows = [list(compress(*row)) for row in zip(tokens, real, strict=True)]
    stops = set(stop_tokens)
    rows = [ids[:-1] if ids and ids[-1] in stops else ids for ids in rows]
    return tokenizer.batch_decode(rows, skip_special_tokens=True)
