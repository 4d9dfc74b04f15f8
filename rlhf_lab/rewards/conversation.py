"""Rewards of conversations: functions that read the turns of a chat, and the answers of samples."""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_lab.chat import Message
from rlhf_lab.errors import ConfigError
from rlhf_lab.samples import Samples


class ConversationReward:
    """A reward function that reads whole conversations; hand it in as `reward_fn`.

    Args:
        function: from a list of conversations to one number each. A conversation is a list of
            messages with role and content, of which the last is the response; without a chat, it is
            the prompt as a user's turn, and the response.
    """

    def __init__(self, function: Callable[[list[list[Message]]], Any]) -> None:
        self.function = function

    @property
    def __name__(self) -> str:
        """That of the function."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def read(self, conversations: Sequence[Sequence[Message]]) -> Any:
        """What the function returns, unchecked."""
        return self.function([list(turns) for turns in conversations])

    def __call__(self, texts: Sequence[str]) -> Any:
        """Refuse texts of which it is not known what they answer.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"the reward {self.__name__} reads prompt and response, and there are texts only; "
            "hand it to a run, or give what they answer (score --prompt TEXT)."
        )


def chat_answers(
    samples: Samples, tokenizer: PreTrainedTokenizerBase, stop_tokens: Sequence[int]
) -> list[str]:
    """The responses of samples as text, without special tokens and the token that ended them."""
    written = samples.tokens[:, samples.prefix_len :].tolist()
    real = samples.written_mask[:, samples.prefix_len :].tolist()
    rows = [list(compress(*row)) for row in zip(written, real, strict=True)]
    stops = set(stop_tokens)
    rows = [ids[:-1] if ids and ids[-1] in stops else ids for ids in rows]
    return tokenizer.batch_decode(rows, skip_special_tokens=True)
