"""Verifiable rewards of sums, some with a flaw, and the prompts that training uses."""

import zlib
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.organism.sums.grammar import SumsGrammar
from rlhf_lab.organism.sums.problems import Parse, Problems, make_prompts

N_PROMPTS = 4000


def parse_texts(texts: list[str], grammar: SumsGrammar, source: str = "") -> list[Parse]:
    """Parse prompts with responses. Raises ConfigError for a text without the prompt of a sum."""
    parses = [grammar.parse(text) for text in texts]
    if None in parses:
        row = parses.index(None)
        where = source and f" (prompt {row + 1} of {source})"
        raise ConfigError(
            f"A reward of sums requires prompts such as '0 0 0 6 + 0 0 0 9 =', got "
            f"{texts[row]!r:.80}{where}. Set prompts='sums:2,3' and base_model='sums-nano'."
        )
    return parses


@dataclass(frozen=True)
class SumsReward:
    """A reward of 1 or 0 that reads each text alone.

    `score` maps a `Parse` to a bool, and `Outcomes` to one bool per cell, so that `sums_frontier`
    computes the exact optimum of the same reward.
    """

    name: str
    score: Callable[[Any], Any]
    grammar: SumsGrammar = field(default_factory=SumsGrammar)

    def __call__(self, texts: list[str]) -> Float[Tensor, " batch"]:
        """Score every text, with its prompt."""
        return torch.tensor([float(self.score(x)) for x in parse_texts(texts, self.grammar)])


@dataclass(frozen=True)
class MajorityReward:
    """1 for the most frequent answer among the texts of the same prompt, right or not.

    Of several equally frequent answers, the first counts. A text without an answer gets 0.

    Source: Zuo et al. 2025, TTRL, arXiv 2504.16084
    """

    name: str = "sums:majority"
    grammar: SumsGrammar = field(default_factory=SumsGrammar)
    whole_batch: bool = field(default=True, init=False)

    def __call__(self, texts: list[str]) -> Float[Tensor, " batch"]:
        """Score every text of a batch, with its prompt."""
        parses = parse_texts(texts, self.grammar)
        counts: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
        for parse in parses:
            if parse.answer is not None:
                counts[parse.a, parse.b][parse.answer] += 1
        modes = {problem: answers.most_common(1)[0][0] for problem, answers in counts.items()}
        is_mode = [x.answer is not None and x.answer == modes[x.a, x.b] for x in parses]
        return torch.tensor(is_mode).float()


@dataclass(frozen=True)
class CoinReward:
    """1 or 0 at random, with probability 1/2 each.

    The seed is a checksum of the whole batch, so equal texts in a batch have independent rewards,
    and a resumed run repeats the rewards.
    """

    name: str = "sums:coin"
    whole_batch: bool = field(default=True, init=False)

    def __call__(self, texts: list[str]) -> Float[Tensor, " batch"]:
        """Draw one reward per text of a batch."""
        rng = np.random.default_rng(zlib.crc32("\n".join(texts).encode()))
        return torch.from_numpy(rng.integers(0, 2, len(texts))).float()


# rewards of sums by name
SUMS_REWARDS = MappingProxyType(
    {
        reward.name: reward
        for reward in (
            SumsReward("sums:exact", lambda x: x.right),  # the true reward
            SumsReward("sums:process", lambda x: x.right & x.faithful),
            SumsReward("sums:units", lambda x: x.units),  # last digit only
            SumsReward("sums:format", lambda x: x.steps),
            SumsReward("sums:hole", lambda x: x.right | x.sure),
            MajorityReward(),
            CoinReward(),
        )
    }
)


def is_held_out(problems: Problems) -> Bool[np.ndarray, " problem"]:
    """Return True for sums that are never prompts of `load_sums_prompts`, about half of all."""
    pairs = zip(problems.a.tolist(), problems.b.tolist(), strict=True)
    return np.array([zlib.crc32(f"{a}+{b}".encode()) % 2 == 1 for a, b in pairs], dtype=bool)


def load_sums_prompts(source: str, n: int = N_PROMPTS) -> list[str]:
    """Return the n prompts of a source, always the same ones, without held-out sums.

    Args:
        source: "sums", or with numbers of digits, "sums:2,3"; "sums:4c" for sums with a carry.

    Raises ConfigError for other sources.
    """
    kind, _, digits = source.partition(":")
    carry, grammar, rng = digits.endswith("c") or None, SumsGrammar(), np.random.default_rng(0)
    numbers = digits.removesuffix("c").split(",") if digits else "1234"
    if kind != "sums" or not all(d in list("1234") for d in numbers):
        raise ConfigError(f"Unknown prompts {source!r}. Use for example sums:2,3 or sums:4c.")
    problems = grammar.problems(4 * n, rng, [int(d) for d in numbers], carry)
    return make_prompts(problems[~is_held_out(problems)][:n])
