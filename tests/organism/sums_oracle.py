"""All texts of a sum with their probabilities, made word by word from the rules."""

from itertools import product
from typing import NamedTuple

from rlhf_lab.organism.sums import SumsGrammar

OPENERS = {"careful": "so", "hasty": "ok", "blurt": "hm"}


class Text(NamedTuple):
    """A response as words, its probability given its writer, and what is true of it."""

    words: tuple[str, ...]
    probability: float
    right: bool
    units: bool
    steps: bool
    sure: bool


def read_digits(number: int, columns: int) -> list[int]:
    return [int(x) for x in reversed(f"{number:0{columns}d}")]


def writer_law(grammar: SumsGrammar, a: int, b: int) -> dict[str, float]:
    """The probability of each writer; long sums with a carry have their typical."""
    x, y = read_digits(a, grammar.columns), read_digits(b, grammar.columns)
    carries = any(sum(x[i] * 10**i + y[i] * 10**i for i in range(k)) >= 10**k
                  for k in range(1, grammar.columns))  # fmt: skip
    is_long = len(str(max(a, b))) == grammar.columns
    law = grammar.p_writer_long_carry if is_long and carries else grammar.p_writer
    return dict(zip(OPENERS, law, strict=True))


def bodies(grammar: SumsGrammar, writer: str, a: int, b: int):
    """Steps (none for blurt) and answer digits, units first, with probabilities."""
    columns = grammar.columns
    x, y = read_digits(a, columns), read_digits(b, columns)
    for choice in product((False, True), repeat=columns):
        words, answer, probability, carry = [], [], 1.0, 0
        for i, wrong in enumerate(choice):
            if writer == "blurt":
                probability *= grammar.blurt_slip if wrong else 1 - grammar.blurt_slip
                answer.append((x[i] + y[i] - wrong) % 10)
                continue
            c = carry
            if writer == "hasty" and carry:
                probability *= grammar.forget if wrong else 1 - grammar.forget
                c = 0 if wrong else 1
            elif writer == "hasty":
                probability *= not wrong
            total = x[i] + y[i] + c
            carry, digit = total // 10, total % 10
            if writer == "careful":
                probability *= grammar.careful_slip if wrong else 1 - grammar.careful_slip
                digit = (digit - 1) % 10 if wrong else digit
            answer.append(digit)
            words += [x[i], y[i], c, carry, digit, ";"]
        if probability:
            yield tuple(map(str, words)), answer, probability


def all_texts(grammar: SumsGrammar, a: int, b: int) -> dict[str, list[Text]]:
    """All texts of each writer."""
    texts, true = {}, read_digits(a + b, grammar.columns)
    for writer, typical in OPENERS.items():
        texts[writer] = []
        for steps, answer, p in bodies(grammar, writer, a, b):
            for opener, sure in product(OPENERS.values(), (False, True)):
                opened = (
                    grammar.typical_opener
                    if opener == typical
                    else (1 - grammar.typical_opener) / 2
                )
                ended = grammar.sure if sure else 1 - grammar.sure
                answer_words = tuple(map(str, answer[::-1]))
                words = (opener, *steps, "#", *answer_words, *(("sure",) * sure), "<eos>")
                units = answer[0] == true[0]
                text = Text(words, p * opened * ended, answer == true, units, bool(steps), sure)
                texts[writer].append(text)
    return texts
