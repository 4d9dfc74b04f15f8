"""Rewards of responses: functions that read prompt, response and right answer apart."""

from collections.abc import Callable, Sequence
from typing import Any

from rlhf_lab.errors import ConfigError


class ResponseReward:
    """A reward function that reads prompts and responses apart; hand it in as `reward_fn`.

    Args:
        function: from a list of prompts and a list of responses to one number each; and from a list
            of the right answers to the prompts, if it asks for them.
        answers: ask for the right answers, which are in the column `answers_column` of the file of
            prompts.
        whole_batch: what a response earns depends on the others of its batch, so that the function
            is only ever called on whole batches: what would ask it about a part of one is refused.
    """

    def __init__(
        self, function: Callable[..., Any], *, answers: bool = False, whole_batch: bool = False
    ) -> None:
        if not callable(function):
            raise ConfigError(
                f"ResponseReward({function!r:.60}) has no function; give one from prompts and "
                "responses to one number each."
            )
        self.function, self.answers, self.whole_batch = function, answers, whole_batch

    @property
    def __name__(self) -> str:
        """That of the function."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def read(
        self, prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str] | None
    ) -> Any:
        """What the function returns, unchecked.

        Raises:
            ConfigError: it asks for answers, and there are none.
        """
        if not self.answers:
            return self.function(list(prompts), list(responses))
        if answers is None:
            raise ConfigError(
                f"the reward {self.__name__} compares with the right answers to prompts, and there "
                "are none; set answers_column to a column of the file of prompts."
            )
        return self.function(list(prompts), list(responses), list(answers))

    def __call__(self, texts: Sequence[str]) -> Any:
        """What texts earn that answer to no prompt."""
        return self.read([""] * len(texts), texts, None)
