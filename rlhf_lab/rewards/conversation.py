"""Texts of a batch, and rewards that read prompts and responses apart or whole conversations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_lab.chat import Message, make_turn
from rlhf_lab.errors import ConfigError
from rlhf_lab.samples import Samples


@dataclass(frozen=True)
class TextBatch:
    """The texts of a batch, as rewards read them."""

    texts: list[str]  # prompts with their responses; in a chat, the responses only
    prompts: Sequence[str] | None = None  # of each text; in a chat, the last user message
    answers: list[str] | None = None  # the right answer to each prompt, if known
    samples: Samples | None = None  # the tokens, for rewards on token ids
    turns: Sequence[Sequence[Message]] | None = None  # the chats, which end with the response

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
        turns = [(*before, make_turn("assistant", response)) for before, response in pairs]
        return cls(list(responses), prompts, answers, samples, turns)

    def conversations(self) -> list[list[Message]]:
        """Return the chats; without a chat, stripped prompt and response as two messages."""
        if self.turns is not None:
            return [list(turns) for turns in self.turns]
        if self.prompts is None:
            raise ConfigError(
                "the reward, such as a reward model with one logit, reads prompt and response, and "
                "there are texts only. To score them, pass the prompts (score --prompt TEXT)."
            )
        pairs = ((a.strip(), b.strip()) for a, b in zip(*self.split(), strict=True))
        return [[make_turn("user", a), make_turn("assistant", b)] for a, b in pairs]

    def split(self) -> tuple[list[str], list[str]]:
        """Return prompts and responses."""
        prompts = [""] * len(self.texts) if self.prompts is None else list(self.prompts)
        if self.turns is not None:
            return prompts, list(self.texts)
        pairs = zip(self.texts, prompts, strict=True)
        return prompts, [text.removeprefix(prompt) for text, prompt in pairs]


def reward_name(reward_fn: Any) -> str:
    """Return the name of a reward's function or class."""
    return getattr(reward_fn, "__name__", type(reward_fn).__name__)


class ResponseReward:
    """A `reward_fn` that reads prompts and responses apart.

    Args:
        function: from a list of prompts and a list of responses to one number each; with
            `answers=True` it also gets the list of right answers.
        answers: True if the function reads the right answers, from `answers_column`.
        whole_batch: True if the reward of a response depends on the other responses. The function
            is then only called on whole batches, and settings that score a part are rejected.
    """

    def __init__(
        self, function: Callable[..., Any], *, answers: bool = False, whole_batch: bool = False
    ) -> None:
        self.function, self.answers, self.whole_batch = function, answers, whole_batch

    @property
    def __name__(self) -> str:
        return reward_name(self.function)

    def read(self, batch: TextBatch) -> Any:
        """Call the function and return its result, not validated."""
        if not self.answers:
            return self.function(*batch.split())
        if batch.answers is None:
            raise ConfigError(
                f"the reward {self.__name__} compares with the right answers, which are "
                "not known. To add them, set answers_column to a column of the prompts file."
            )
        return self.function(*batch.split(), list(batch.answers))

    def __call__(self, texts: Sequence[str]) -> Any:
        """Score texts that have no prompt."""
        return self.read(TextBatch(list(texts)))


class ConversationReward(ResponseReward):
    """A `reward_fn` that reads whole conversations.

    Args:
        function: from a list of conversations to one number each. A conversation is a list of
            messages with role and content, of which the last is the response. Without a chat, it
            is the prompt as a user message, and the response.
    """

    def __init__(self, function: Callable[[list[list[Message]]], Any]) -> None:
        super().__init__(function)

    def read(self, batch: TextBatch) -> Any:
        """Call the function and return its result, not validated."""
        return self.function(batch.conversations())


def chat_answers(
    samples: Samples, tokenizer: PreTrainedTokenizerBase, stop_tokens: Sequence[int]
) -> list[str]:
    """Decode the responses of samples, without special tokens and the final stop token."""
    tokens = samples.tokens[:, samples.prefix_len :].tolist()
    real = samples.written_mask[:, samples.prefix_len :].tolist()
    rows = [list(compress(*row)) for row in zip(tokens, real, strict=True)]
    rows = [ids[:-1] if ids and ids[-1] in stop_tokens else ids for ids in rows]
    return tokenizer.batch_decode(rows, skip_special_tokens=True)
