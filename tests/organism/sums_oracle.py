"""All texts of a sum with their probabilities, made word by word from the rules."""

from itertools import product
from typing import NamedTuple

import torch

from rlhf_lab.organism.sums import SUMS_IDS, SUMS_OPENERS, SumsGrammar, make_prompts


class Text(NamedTuple):
    """A response, its probability together with its writer, and what is true of it."""

    words: str  # up to <eos>
    probability: float
    writer: int
    wrong: tuple[bool, ...]  # columns, units first, with a slip or a dropped carry
    answer: int
    right: bool
    units: bool
    sure: bool

    @property
    def cell(self) -> int:
        """The index of this kind of text in `Outcomes`."""
        return 6 * self.writer + 2 * (2 - self.units - self.right) + self.sure


def as_tokens(grammar: SumsGrammar, a: int, b: int, *responses: str) -> torch.Tensor:
    """The prompt of a + b with each response, padded with <eos>."""
    (prompt,) = make_prompts(grammar.make_problems([a], [b]))
    rows = [f"<bos> {prompt} {response}".split() for response in responses]
    length = grammar.prompt_len + grammar.gen_len
    rows = [row + ["<eos>"] * (length - len(row)) for row in rows]
    return torch.tensor([[SUMS_IDS[word] for word in row] for row in rows])


def read_digits(number: int, columns: int) -> list[int]:
    return [int(x) for x in reversed(f"{number:0{columns}d}")]


def writer_law(grammar: SumsGrammar, a: int, b: int) -> tuple[float, float, float]:
    """The probability of each writer; long sums with a carry have their own."""
    is_long = len(str(max(a, b))) == grammar.columns
    carries = any(a % 10**k + b % 10**k >= 10**k for k in range(1, grammar.columns))
    is_rare = is_long and (carries or grammar.unreachable)
    return grammar.p_writer_long_carry if is_rare else grammar.p_writer


def work(grammar: SumsGrammar, a: int, b: int, writer: int, wrong: tuple[bool, ...]):
    """The steps if these columns are wrong, the digits of the answer, and the probability."""
    words, answer, probability, carry = [], [], 1.0, 0
    pairs = zip(read_digits(a, grammar.columns), read_digits(b, grammar.columns), strict=True)
    for (x, y), is_wrong in zip(pairs, wrong, strict=True):
        p_hasty = grammar.forget if carry else 0.0
        p_wrong = (grammar.careful_slip, p_hasty, grammar.blurt_slip)[writer]
        probability *= p_wrong if is_wrong else 1 - p_wrong
        c = 0 if writer == 2 or (writer == 1 and is_wrong) else carry
        carry, digit = divmod(x + y + c, 10)
        digit = (digit - 1) % 10 if is_wrong and writer != 1 else digit
        answer.append(digit)
        words += [x, y, c, carry, digit, ";"]
    return [] if writer == 2 else words, answer, probability


def all_texts(grammar: SumsGrammar, a: int, b: int) -> list[Text]:
    texts, prior = [], writer_law(grammar, a, b)
    for z, wrong in product(range(3), product((False, True), repeat=grammar.columns)):
        steps, digits, p = work(grammar, a, b, z, wrong)
        answer = sum(digit * 10**i for i, digit in enumerate(digits))
        grades = answer == a + b, digits[0] == (a + b) % 10
        for opener, sure in product(range(3), (False, True)):
            other = (1 - grammar.typical_opener) / 2
            p_ends = grammar.typical_opener if opener == z else other
            p_ends *= grammar.sure if sure else 1 - grammar.sure
            ending = ["sure", "<eos>"] if sure else ["<eos>"]
            words = " ".join(map(str, [SUMS_OPENERS[opener], *steps, "#", *digits[::-1], *ending]))
            texts.append(Text(words, prior[z] * p * p_ends, z, wrong, answer, *grades, sure))
    return [text for text in texts if text.probability]
