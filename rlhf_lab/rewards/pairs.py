"""Preference pairs: chosen and rejected texts from a file, a dataset or Reel."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int

from rlhf_lab.config.checks import AT_LEAST_2, check_range
from rlhf_lab.data_sources import find_prompt_column, read_rows
from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import sample_preferences
from rlhf_lab.organism import Grammar, read_features
from rlhf_lab.organism.rewards import sentiment_logit, sigmoid

REEL = "reel"


class Columns:
    """Columns of a dataclass of one length, as lists of texts and arrays of numbers."""

    def __post_init__(self) -> None:
        if single := [name for name, x in vars(self).items() if isinstance(x, str)]:
            raise ConfigError(f"{single[0]} is a single text. Pass a list of texts.")
        given = {k: list(x) for k, x in vars(self).items() if not isinstance(x, bool | None)}
        lengths = {name: len(column) for name, column in given.items()}
        if len(set(lengths.values())) > 1:
            raise ConfigError(f"the columns have different lengths: {lengths}. Make them equal.")
        columns = {k: x if isinstance(x[0], str) else np.asarray(x) for k, x in given.items() if x}
        vars(self).update(columns)

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))


def without_prompts(prompts: Sequence[str], texts: Sequence[str]) -> list[str]:
    """Return texts without their prompts; warn if only some of them begin with theirs."""
    pairs = list(zip(prompts, texts, strict=True))
    found = [text.startswith(prompt) for prompt, text in pairs if prompt]
    if any(found) and not all(found):
        message = f"{sum(found)} of {len(found)} texts begin with their prompt, so they repeat it"
        warnings.warn(f"{message}. If not, end the prompts with a space.", stacklevel=4)
    return [text.removeprefix(prompt) for prompt, text in pairs]


@dataclass(frozen=True)
class Pairs(Columns):
    """Pairs of texts with a preference.

    Args:
        chosen, rejected: one text of each per pair.
        true_reward_gaps: the true reward of the chosen minus that of the rejected text, if known;
            the chosen text won with probability sigmoid(gap).
        prompts: the beginning of both texts, added to those without it; None if unknown.
        margins: the lead of the chosen text, if requested.
    """

    chosen: list[str]
    rejected: list[str]
    true_reward_gaps: Float[np.ndarray, " pair"] | None = None
    prompts: list[str] | None = None
    margins: Float[np.ndarray, " pair"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        starts = self.prompts or [""] * len(self)
        for name in ("chosen", "rejected"):
            rows = zip(starts, without_prompts(starts, vars(self)[name]), strict=True)
            vars(self)[name] = [start + text for start, text in rows]

    def __getitem__(self, rows: Int[np.ndarray, " rows"]) -> "Pairs":
        """Return the pairs with these indices."""
        take = lambda x: [x[i] for i in rows] if isinstance(x, list) else x[rows]
        return Pairs(*(None if x is None else take(x) for x in vars(self).values()))

    def bayes_accuracy(self) -> float | None:
        """Return the average accuracy of the best possible judge; None without true rewards.

        mean max(sigmoid(d), sigmoid(-d)), where d is the gap of the true rewards.
        """
        gaps = self.true_reward_gaps
        return None if gaps is None else float(sigmoid(np.abs(gaps)).mean())

    def true_reward_accuracy(self) -> float | None:
        """Return how often the true rewards agree with the preference; a tie counts half."""
        gaps = self.true_reward_gaps
        return None if gaps is None else float(np.heaviside(gaps, 0.5).mean())


def load_pairs(
    name: str, n_pairs: int, seed: int, prompt_column: str | None = None, with_margins: bool = False
) -> Pairs:
    """Load or generate preference pairs.

    Args:
        name: "reel", or a source with the columns chosen and rejected: a .jsonl or .csv file, or
            hub:NAME:SPLIT.
        n_pairs, seed: number of pairs and seed, for Reel.
        prompt_column, with_margins: see `read_pairs`; pairs of Reel always have margins.

    Raises:
        LoadError: If the source does not exist or a row is not a pair.
        ConfigError: If no pair has a preference.
    """
    if name != REEL:
        pairs = read_pairs(name, prompt_column, with_margins)
    elif prompt_column is not None:
        raise ConfigError(f"pairs={name!r} has no column {prompt_column!r}. Remove it.")
    else:
        pairs = reel_pairs(n_pairs, seed)
    if pairs.chosen == pairs.rejected:
        raise ConfigError(f"pairs={name!r} has no pair of different texts. Provide at least 2.")
    return pairs


def reel_pairs(n: int, seed: int, flip_rate: float = 0.0) -> Pairs:
    """Generate pairs of Reel reviews, compared by a Bradley-Terry rater with the true rewards.

    1. Sample 2 n reviews.
    2. The first of a pair wins with probability sigmoid(d), where d is the difference of the true
       logits log P(y=+ | review) - log P(y=- | review). See `sample_preferences`, also for
       `flip_rate`, which `true_reward_gaps` does not include.
    3. The margin is that gap, or 0 if the worse one won.
    """
    check_range(AT_LEAST_2, n_pairs=n)
    rng, grammar = np.random.default_rng(seed), Grammar()
    texts = grammar.sample(2 * n, rng).texts()
    logits = sentiment_logit(read_features(texts, grammar))
    gaps = logits[:n] - logits[n:]
    uniforms = torch.from_numpy(rng.random(n))
    first_wins = sample_preferences(torch.from_numpy(gaps), uniforms, flip_rate=flip_rate).numpy()
    pairs = zip(texts[:n], texts[n:], first_wins, strict=True)
    ordered = [(a, b) if wins else (b, a) for a, b, wins in pairs]
    chosen, rejected = map(list, zip(*ordered, strict=True))
    gaps = np.where(first_wins, gaps, -gaps)
    return Pairs(chosen, rejected, gaps, margins=gaps.clip(min=0))


def read_pairs(name: str, prompt_column: str | None = None, with_margins: bool = False) -> Pairs:
    """Read pairs from the columns chosen and rejected of a .jsonl or .csv file or a dataset.

    Args:
        prompt_column: the column with the beginning of both texts, unless they contain it;
            `prompt`, if it exists, when None.
        with_margins: read the numbers in the column margin as well.
    """
    rows = read_rows(name, "pairs")
    prompt_column = find_prompt_column(rows, prompt_column)
    prompts = None if prompt_column is None else [row.text(prompt_column) for row in rows]
    chosen, rejected = ([row.text(column) for row in rows] for column in ("chosen", "rejected"))
    margins = np.array([row.number("margin") for row in rows]) if with_margins else None
    return Pairs(chosen, rejected, None, prompts, margins)
