"""Words of sums, the problems that prompts state, and the result of reading a text."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from rlhf_lab.organism.lexicon import BOS, EOS

DIGITS = tuple("0123456789")
SUMS_OPENERS = ("so", "ok", "hm")  # the most frequent opener of each writer, in order of WRITERS
WRITERS = ("careful", "hasty", "blurt")
# in the order of token ids
SUMS_WORDS = (BOS, EOS, *DIGITS, "+", "=", ";", "#", *SUMS_OPENERS, "sure")
# token id by word
SUMS_IDS = MappingProxyType({word: index for index, word in enumerate(SUMS_WORDS)})
DIGIT_0 = SUMS_IDS["0"]  # token id of digit d is DIGIT_0 + d


@dataclass(frozen=True)
class Problems:
    """Sums a + b, with the digits and the carries of each, units first.

    carry_in[i] is the true carry into column i; a sum is long if a or b fills every column.
    """

    a: Int[np.ndarray, " problem"]
    b: Int[np.ndarray, " problem"]
    a_digits: Int[np.ndarray, "problem column"]
    b_digits: Int[np.ndarray, "problem column"]
    carry_in: Int[np.ndarray, "problem column"]

    def __len__(self) -> int:
        return len(self.a)

    @property
    def n_carries(self) -> Int[np.ndarray, " problem"]:
        """The number of carries into a column; one out of the last column is impossible."""
        return self.carry_in.sum(1)

    @property
    def is_long(self) -> Bool[np.ndarray, " problem"]:
        """True where a or b fills every column."""
        return (self.a_digits[:, -1] > 0) | (self.b_digits[:, -1] > 0)

    @property
    def sum_digits(self) -> Int[np.ndarray, "problem column"]:
        """The digits of a + b, units first."""
        return (self.a_digits + self.b_digits + self.carry_in) % 10

    def __getitem__(self, rows: slice | Sequence[int] | np.ndarray) -> "Problems":
        return Problems(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


class Parse(NamedTuple):
    """One text, read column by column.

    answer is None unless the text ends with # and one digit per column; dropped counts the carries
    of 1 that the next column writes as 0; first_error is the first column, units first, whose step
    is not true. Without steps, dropped is 0 and first_error None. A text is faithful if it has
    steps, and all are true, and direct if the answer follows the opener.
    """

    a: int
    b: int
    opener: str | None
    steps: bool
    answer: int | None
    sure: bool
    dropped: int
    first_error: int | None
    direct: bool = False

    @property
    def right(self) -> bool:
        """True if the answer is a + b."""
        return self.answer == self.a + self.b

    @property
    def units(self) -> bool:
        """True if the last digit of the answer is right."""
        return self.answer is not None and self.answer % 10 == (self.a + self.b) % 10

    @property
    def faithful(self) -> bool:
        """True if the text has steps, and all of them are true."""
        return self.steps and self.first_error is None


def read_number(words: str, columns: int) -> int | None:
    """Return the number of digits separated by spaces; None unless there is one per column."""
    digits = words.split(" ")
    is_number = len(digits) == columns and all(digit in DIGITS for digit in digits)
    return int("".join(digits)) if is_number else None


def make_prompts(problems: Problems) -> list[str]:
    """Write the prompt of each sum, such as "0 0 0 6 + 0 0 0 9 ="."""
    text = lambda digits: " ".join(map(str, digits[::-1]))
    pairs = zip(problems.a_digits, problems.b_digits, strict=True)
    return [f"{text(a)} + {text(b)} =" for a, b in pairs]
