"""The grammar of sums: three writers who add two numbers, with or without steps."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int

from rlhf_lab.organism.grammar import Slot, decode
from rlhf_lab.organism.lexicon import BOS, EOS
from rlhf_lab.organism.sums.problems import (
    DIGIT_0,
    DIGITS,
    SUMS_IDS,
    SUMS_OPENERS,
    SUMS_WORDS,
    WRITERS,
    Parse,
    Problems,
    read_number,
)

ANSWER = re.compile(r"(?:^| )# ((?:\d )*\d)(?: sure)?$")


@dataclass(frozen=True)
class SumsLatents:
    """The hidden choices of texts, one entry per text.

    writer indexes WRITERS; error and dropped are True in the columns (units first) with a digit one
    too low and with a carry that was dropped.
    """

    writer: Int[np.ndarray, " batch"]
    error: Bool[np.ndarray, "batch column"]
    dropped: Bool[np.ndarray, "batch column"]


@dataclass(frozen=True)
class Worked:
    """Sampled texts: prompt and response ids, padded with <eos>, and their latents.

    mask is True on the tokens of the response, up to and including the first <eos>.
    """

    tokens: Int[np.ndarray, "batch seq"]
    mask: Bool[np.ndarray, "batch seq"]
    latents: SumsLatents

    def texts(self) -> list[str]:
        """Decode every prompt with its response, without <bos> and <eos>."""
        return [decode(row, SUMS_WORDS) for row in self.tokens]


@dataclass(frozen=True)
class SumsGrammar:
    """The language of sums: prompts "0 0 0 6 + 0 0 0 9 =", and responses by one of three writers.

    careful writes steps, and each sum digit one too low w.p. careful_slip; hasty writes steps, and
    the carry 1 as 0 in the next column w.p. forget; blurt writes no steps, ignores carries, and
    writes each digit one too low w.p. blurt_slip. Digits are modulo 10.

    Steps, units first: OPEN (a b c t s ;) per column, with t s = a + b + c, then # and the answer.
    Without steps: OPEN # answer. Then "sure" w.p. sure, and <eos>. Each writer opens with the word
    of SUMS_OPENERS at its index w.p. typical_opener, else with one of the other two.

    Args:
        columns: number of digits of an answer; a + b < 10^columns.
        p_writer: probability of each writer, for sums that are not long or have no carry.
        p_writer_long_carry: probability of each writer for long sums with a carry.
        unreachable: use p_writer_long_carry for every long sum, so none is written with steps.
        p_digits: probability of 1, 2, ... digits of a and b.

    Raises ValueError for fractions that do not sum to 1, and for a probability outside [0, 1).
    """

    columns: int = 4
    p_writer: tuple[float, float, float] = (0.15, 0.25, 0.6)
    p_writer_long_carry: tuple[float, float, float] = (0.0, 0.0, 1.0)
    unreachable: bool = False
    p_digits: tuple[float, ...] = (0.25, 0.25, 0.25, 0.25)
    typical_opener: float = 0.6
    careful_slip: float = 0.02
    blurt_slip: float = 0.1
    forget: float = 0.6
    sure: float = 0.02

    def __post_init__(self) -> None:
        if not isinstance(self.columns, int) or not 1 <= self.columns <= 9:
            raise ValueError(f"columns must be an integer from 1 to 9, got {self.columns!r}.")
        lengths = {"p_writer": 3, "p_writer_long_carry": 3, "p_digits": self.columns}
        for name, length in lengths.items():
            fractions = getattr(self, name)
            if len(fractions) != length or min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-9:
                raise ValueError(f"{name} must be {length} numbers that sum to 1, got {fractions}.")
        for name in ("typical_opener", "careful_slip", "blurt_slip", "forget", "sure"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}.")

    @property
    def prompt_len(self) -> int:
        """The number of tokens of a prompt, <bos> included."""
        return 2 * self.columns + 3

    @property
    def gen_len(self) -> int:
        """The number of tokens of the longest response, <eos> included."""
        return 7 * self.columns + 4

    @cached_property
    def opener_probs(self) -> Float[np.ndarray, "writer opener"]:
        """The probability of each opener, by writer."""
        return np.full((3, 3), (1 - self.typical_opener) / 2) + np.eye(3) * (
            self.typical_opener - (1 - self.typical_opener) / 2
        )

    def slots(self, steps: bool) -> tuple[Slot, ...]:
        """Return the positions of a response with or without steps, up to the answer.

        In columns, names end with the column (clause), from 0 for units: "c2", "answer0".
        """
        slots = [Slot("open", None, SUMS_OPENERS)]
        for i in range(self.columns) if steps else ():
            words = {"c": ("0", "1"), "t": ("0", "1")}
            slots += [Slot(f"{name}{i}", i, words.get(name, DIGITS)) for name in "abcts"]
            slots.append(Slot(";", None, (";",)))
        answer = [Slot(f"answer{i}", i, DIGITS) for i in reversed(range(self.columns))]
        return (*slots, Slot("#", None, ("#",)), *answer)

    def slot(self, name: str, steps: bool = True) -> int:
        """Return the index of a slot in a response, from 0.

        Raises ValueError for a name that no slot has.
        """
        names = [slot.name for slot in self.slots(steps)]
        if name not in names:
            raise ValueError(f"Unknown slot {name!r}. Choose one of: {', '.join(names)}.")
        return names.index(name)

    def make_problems(
        self, a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray
    ) -> Problems:
        """Return the sums a + b. Raises ValueError if one is negative or has too many digits."""
        if not all(np.array_equal(x, np.asarray(x, dtype=np.int64)) for x in (a, b)):
            raise ValueError(f"a and b must be lists of integers, got {a} and {b}.")
        a, b = np.asarray(a, dtype=np.int64), np.asarray(b, dtype=np.int64)
        if a.shape != b.shape or a.ndim != 1:
            raise ValueError(f"a and b must be two lists of equal length, got {a.shape}, {b.shape}")
        if len(a) and (min(a.min(), b.min()) < 0 or (a + b).max() >= 10**self.columns):
            raise ValueError(f"a, b and a + b must be between 0 and {10**self.columns - 1}.")
        powers = 10 ** np.arange(self.columns)
        a_digits, b_digits = a[:, None] // powers % 10, b[:, None] // powers % 10
        carry_in = (a[:, None] % powers + b[:, None] % powers) // powers
        return Problems(a, b, a_digits, b_digits, carry_in)

    def problems(
        self,
        n: int,
        rng: np.random.Generator,
        digits: Sequence[int] | None = None,
        carry: bool | None = None,
    ) -> Problems:
        """Draw n sums whose numbers both have d digits, with a + b < 10^columns.

        Args:
            n: number of sums, at least 0.
            digits: the d to draw from, in proportion to p_digits; all by default.
            carry: only sums with (True) or without (False) a carry into a column.

        Raises ValueError for digits without a positive share, and for carries in a single column.
        """
        chosen = np.arange(1, self.columns + 1) if digits is None else np.array(digits, dtype=int)
        if n < 0:
            raise ValueError(f"n must be at least 0, got {n}.")
        if not (chosen.ndim and len(chosen) and 1 <= chosen.min() <= chosen.max() <= self.columns):
            raise ValueError(f"digits must be between 1 and {self.columns}, got {digits}.")
        fractions = np.array(self.p_digits)[chosen - 1]
        if not fractions.sum() > 0:
            raise ValueError(f"digits={digits} has no positive probability in {self.p_digits}.")
        if carry and self.columns == 1:
            raise ValueError("carry=True requires at least 2 columns.")
        pairs = np.zeros((2, 0), dtype=np.int64)
        while pairs.shape[1] < n:
            drawn = self._draw_pairs(rng.choice(chosen, n, p=fractions / fractions.sum()), rng)
            if carry is not None:
                drawn = drawn[:, (self.make_problems(*drawn).n_carries > 0) == carry]
            pairs = np.concatenate([pairs, drawn], axis=1)
        return self.make_problems(*pairs[:, :n])

    def _draw_pairs(
        self, n_digits: Int[np.ndarray, " problem"], rng: np.random.Generator
    ) -> Int[np.ndarray, "2 problem"]:
        low, high = np.where(n_digits == 1, 0, 10 ** (n_digits - 1)), 10**n_digits
        pairs = rng.integers(low, high, (2, len(low)))
        while (too_large := pairs.sum(0) >= 10**self.columns).any():
            size = (2, too_large.sum())
            pairs[:, too_large] = rng.integers(low[too_large], high[too_large], size)
        return pairs

    def writer_probs(self, problems: Problems) -> Float[np.ndarray, "problem writer"]:
        """Return the probability of each writer, by problem."""
        has_carry = problems.is_long & ((problems.n_carries > 0) | self.unreachable)
        return np.where(has_carry[:, None], self.p_writer_long_carry, self.p_writer)

    def sample(
        self, problems: Problems, rng: np.random.Generator, writer: str | None = None
    ) -> Worked:
        """Write one text per problem, by writers drawn at random or by the given one.

        tokens has shape [problem, prompt_len + gen_len]. Raises ValueError for an unknown writer.
        """
        n, columns = len(problems), self.columns
        cumulative = self.writer_probs(problems).cumsum(1)
        z = (rng.random((n, 1)) >= cumulative[:, :2]).sum(1)
        if writer is not None:
            if writer not in WRITERS:
                raise ValueError(f"Unknown writer {writer!r}. Choose one of: {', '.join(WRITERS)}.")
            z = np.full(n, WRITERS.index(writer))
        slip = np.array([self.careful_slip, 0.0, self.blurt_slip])[z]
        error = rng.random((n, columns)) < slip[:, None]
        forgets = rng.random((n, columns)) < self.forget
        wrong = np.where((z == 1)[:, None], forgets, error)
        c, t, s, dropped = self.work_columns(problems, z, wrong)
        opener = (rng.random((n, 1)) >= self.opener_probs[z].cumsum(1)[:, :2]).sum(1)
        has_sure = rng.random(n) < self.sure
        tokens = np.full((n, self.gen_len), SUMS_IDS[EOS])
        digits = {"a": problems.a_digits, "b": problems.b_digits, "c": c, "t": t, "s": s}
        digits["answer"] = s
        for steps in (True, False):
            rows, slots = np.flatnonzero((z < 2) == steps), self.slots(steps)
            for j, (name, column, words) in enumerate(slots):
                value = SUMS_IDS[words[0]]
                if name == "open":
                    value = value + opener[rows]
                elif column is not None:
                    value = value + digits[name.rstrip("0123456789")][rows, column]
                tokens[rows, j] = value
            tokens[rows[has_sure[rows]], len(slots)] = SUMS_IDS["sure"]
        prompt = self.prompt_tokens(problems)
        latents, is_eos = SumsLatents(z, error, dropped), tokens == SUMS_IDS[EOS]
        is_real = is_eos.cumsum(1) - is_eos == 0  # up to and including the first <eos>
        mask = np.concatenate([np.zeros_like(prompt, dtype=bool), is_real], axis=1)
        return Worked(np.concatenate([prompt, tokens], axis=1), mask, latents)

    def work_columns(
        self,
        problems: Problems,
        writer: Int[np.ndarray, " problem"],
        wrong: Bool[np.ndarray, "problem column"],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Add column by column: carries in, carries out, sum digits, and dropped carries.

        A wrong column has a digit one too low, or for hasty, drops its carry of 1.
        """
        c, t, s = (np.zeros(wrong.shape, dtype=np.int64) for _ in range(3))
        dropped, carry = np.zeros_like(wrong), np.zeros(len(problems), dtype=np.int64)
        for i in range(self.columns):
            dropped[:, i] = wrong[:, i] & (writer == 1) & (carry == 1)
            c[:, i] = np.where((writer == 2) | dropped[:, i], 0, carry)
            total = problems.a_digits[:, i] + problems.b_digits[:, i] + c[:, i]
            t[:, i] = carry = total // 10
            s[:, i] = (total - (wrong[:, i] & (writer != 1))) % 10
        return c, t, s, dropped

    def prompt_tokens(self, problems: Problems) -> Int[np.ndarray, "problem prefix_len"]:
        """Return the token ids of each prompt, <bos> included."""
        word = lambda name: np.full((len(problems), 1), SUMS_IDS[name])
        a, b = (DIGIT_0 + x[:, ::-1] for x in (problems.a_digits, problems.b_digits))
        return np.concatenate([word(BOS), a, word("+"), b, word("=")], axis=1)

    def read_problems(self, tokens: Int[np.ndarray, "batch seq"]) -> Problems:
        """Read the sums of prompts that `prompt_tokens` wrote, with responses or without.

        Raises ValueError for a row that does not begin with a prompt.
        """
        digits = np.asarray(tokens)[:, : self.prompt_len] - DIGIT_0
        powers = 10 ** np.arange(self.columns)[::-1]
        a, b = digits[:, 1 : self.columns + 1], digits[:, self.columns + 2 : -1]
        is_whole = digits.shape[1] == self.prompt_len
        if is_whole and ((0 <= a) & (a < 10) & (0 <= b) & (b < 10)).all():
            problems = self.make_problems(a @ powers, b @ powers)
            if (self.prompt_tokens(problems) - DIGIT_0 == digits).all():
                return problems
        raise ValueError(f"tokens must begin with <bos>, {self.columns} digits, +, as many, and =.")

    def parse(self, text: str) -> Parse | None:
        """Read the prompt, the steps and the answer of a text; None without a complete prompt."""
        prompt, equals, response = text.partition(" =")
        a_words, plus, b_words = prompt.partition(" + ")
        numbers = [read_number(words, self.columns) for words in (a_words, b_words)]
        if not (equals and plus) or None in numbers or response[:1] not in ("", " "):
            return None
        if sum(numbers) >= 10**self.columns:
            return None
        words, found = response.split(), ANSWER.search(response)
        answer = read_number(found[1], self.columns) if found else None
        problem = self.make_problems(*([number] for number in numbers))
        steps = words[1 : 6 * self.columns + 1]
        written = np.array([int(w) if w in DIGITS else -1 for w in steps])
        has_steps = len(words) > len(steps) + 1 and steps[5::6] == [";"] * self.columns
        has_steps = has_steps and words[len(steps) + 1] == "#" and (written[5::6] == -1).all()
        dropped, first_error = 0, None
        if has_steps := has_steps and all(w in DIGITS for w in np.delete(steps, slice(5, None, 6))):
            rows = written.reshape(self.columns, 6)[:, :5]
            total = problem.a_digits[0] + problem.b_digits[0] + problem.carry_in[0]
            true = [problem.a_digits[0], problem.b_digits[0], problem.carry_in[0], total // 10]
            wrong = (rows != np.stack([*true, total % 10], axis=1)).any(1)
            dropped = int(((rows[1:, 2] == 0) & (rows[:-1, 3] == 1)).sum())
            first_error = int(wrong.argmax()) if wrong.any() else None
        return Parse(
            a=numbers[0],
            b=numbers[1],
            opener=words[0] if words and words[0] in SUMS_OPENERS else None,
            steps=has_steps,
            answer=answer,
            sure=words[-1:] == ["sure"],
            dropped=dropped,
            first_error=first_error,
            direct=answer is not None and words[1:2] == ["#"],
        )
