"""Verifiable rewards: exact match with an answer, and regular expressions; nothing is executed."""

import unicodedata
import warnings
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import regex
import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.config import MATCH_OPTIONS
from rlhf_lab.errors import ConfigError
from rlhf_lab.rewards.responses import ResponseReward

NUMBER = regex.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?", regex.ASCII)
MATCH_SECONDS = 0.25
"""What a pattern may take on one response."""


class ExactMatch(ResponseReward):
    """1 for a response that is the right answer to its prompt, else 0.

    Case and punctuation count unless an option says otherwise; blanks at the ends, runs of blanks
    and the forms of one character (Unicode NFKC) never do.

    Args:
        options: `ignore_case`; `ignore_punctuation`, which leaves out every character of the
            Unicode category P; `last_number`, which compares the value of the last number of each
            (1,000.0 is 1000), and gives 0 where the response has none.

    Raises:
        ConfigError: another option.

    Source: the normalisation is that of SQuAD (Rajpurkar et al. 2016), which also drops articles;
    the last number is that of GSM8K (Cobbe et al. 2021).
    """

    def __init__(self, *options: str) -> None:
        super().__init__(self._matches, answers=True)
        for option in options:
            if option not in MATCH_OPTIONS:
                raise ConfigError(
                    f"exact_match has no option {option!r:.60}; choose of "
                    f"{', '.join(MATCH_OPTIONS)}."
                )
        self.options = frozenset(options)

    __name__ = "exact_match"

    def _matches(
        self, prompts: Sequence[str], responses: Sequence[str], answers: Sequence[str]
    ) -> Float[Tensor, " batch"]:
        pairs = zip(responses, answers, strict=True)
        return torch.tensor([float(self.is_match(*pair)) for pair in pairs])

    def is_match(self, response: str, answer: str) -> bool:
        """Whether a response is this answer.

        Raises:
            ConfigError: the answer has no number, and the last is compared.
        """
        if "last_number" not in self.options:
            return self._normalized(response) == self._normalized(answer)
        wanted = last_number(answer)
        if wanted is None:
            raise ConfigError(
                f"the answer {answer!r:.80} has no number to compare with; leave last_number out, "
                "or correct the column of answers."
            )
        return last_number(response) == wanted

    def _normalized(self, text: str) -> str:
        """What is left of a text to compare."""
        text = unicodedata.normalize("NFKC", text)
        if "ignore_case" in self.options:
            text = text.casefold()
        if "ignore_punctuation" in self.options:
            text = "".join(c for c in text if not unicodedata.category(c).startswith("P"))
        return " ".join(text.split())


def last_number(text: str) -> Fraction | None:
    """The value of the last number in a text, of digits with commas and a point; None without."""
    found = NUMBER.findall(text)
    return Fraction(found[-1].replace(",", "")) if found and len(found[-1]) < 1000 else None


class RegexReward(ResponseReward):
    """1 for a response that a pattern matches as a whole, else 0; blanks at its ends apart.

    A pattern that takes longer than a quarter of a second on a response, as nested repetitions can
    on texts that almost match, pays 0 for it, with a warning.

    Args:
        pattern: of the package `regex`, whose syntax has all of Python's own `re`.

    Raises:
        ConfigError: it is no pattern.
    """

    def __init__(self, pattern: str) -> None:
        super().__init__(self._matches)
        self.pattern = compiled(pattern, "reward_fn='regex:...'")

    __name__ = "regex"

    def _matches(self, prompts: Sequence[str], responses: Sequence[str]) -> Float[Tensor, " batch"]:
        return torch.tensor([float(self.is_match(response)) for response in responses])

    def is_match(self, response: str) -> bool:
        """Whether the pattern matches all of a response."""
        return fully_matches(self.pattern, response.strip())


def compiled(pattern: str, where: str) -> regex.Pattern:
    """A pattern of the package `regex`.

    Args:
        where: what it is the pattern of, for the error message.

    Raises:
        ConfigError: it is none.
    """
    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ConfigError(
            f"{where} has {pattern!r:.80}, no pattern ({error}); correct it."
        ) from None


def fully_matches(pattern: regex.Pattern, text: str) -> bool:
    """Whether a pattern matches a whole text, in the time that it may take; see `found_in`."""
    return _in_time(pattern.fullmatch, pattern.pattern, text)


def found_in(pattern: str, text: str) -> bool:
    """Whether a pattern matches somewhere in a text; warns where it does not end in time."""
    return _in_time(regex.compile(pattern).search, pattern, text)


def _in_time(match: Callable[..., Any], pattern: str, text: str) -> bool:
    try:
        return match(text, timeout=MATCH_SECONDS) is not None
    except TimeoutError:
        warnings.warn(
            f"the pattern {pattern!r:.80} took longer than {MATCH_SECONDS} s on {text!r:.80}, "
            "which counts as no match; write it without repetitions within repetitions.",
            stacklevel=2,
        )
        return False
