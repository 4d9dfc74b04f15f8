"""Texts judged one by one, good or bad, for KTO: from a file, or from preference pairs."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from rlhf_lab.data_sources import LABEL, MOVIE_REVIEWS, Row, read_rows
from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.rewards.pairs import REEL, Pairs, load_pairs
from rlhf_lab.supervised import hold_out

RESPONSES = ("response", "completion")
WORDS = {"good": True, "true": True, "1": True, "bad": False, "false": False, "0": False}


@dataclass(frozen=True)
class Judged:
    """Responses to prompts, each judged by itself.

    Args:
        prompts: given, and not to be learned; empty where a text stands alone.
        texts: what was judged; each follows its prompt as it is, without a blank between.
        is_good: how.
        groups: a number for each; those that share it (the two of a pair, the responses to one
            prompt) are held out together or not at all.
    """

    prompts: list[str]
    texts: list[str]
    is_good: Bool[np.ndarray, " example"]
    groups: Int[np.ndarray, " example"]

    def __len__(self) -> int:
        return len(self.texts)

    def hold_out(
        self, share: float, rng: np.random.Generator
    ) -> tuple[Int[np.ndarray, " held_out"], Int[np.ndarray, " train"]]:
        """Deal the texts into those held out and those to train on, group by group.

        Raises:
            ConfigError: there are fewer than 2 groups.
        """
        groups = np.unique(self.groups)
        kept, _ = hold_out(len(groups), share, rng)
        is_held_out = np.isin(self.groups, groups[kept])
        return np.flatnonzero(is_held_out), np.flatnonzero(~is_held_out)


def load_judged(name: str, n_pairs: int, seed: int, prompt_column: str | None = None) -> Judged:
    """The judged texts that a name stands for.

    Args:
        name: "reel" or "movie-reviews", whose pairs are taken apart; or a file or hub:NAME:SPLIT
            with the columns label and response (or completion), or chosen and rejected.
        n_pairs, seed: how many pairs to make and from what seed; Reel's and real reviews' only.
        prompt_column: where the prompts are; there are none when None, but in a file of single
            responses that has the column prompt.

    Raises:
        LoadError: no such source, or one sentence on the first row that is none of these.
        ConfigError: fewer than 2 texts, or all of them good, or all bad.
    """
    made = name == REEL or name.partition(":")[0] == MOVIE_REVIEWS
    rows = [] if made else read_rows(name, "examples")
    if made or (rows and _has(rows[0], "chosen")):
        judged = split_pairs(load_pairs(name, n_pairs, seed, prompt_column))
    else:
        judged = _of_rows(rows, prompt_column)
    good, n = int(judged.is_good.sum()), len(judged)
    if not 0 < good < n:
        raise ConfigError(
            f"examples={name!r} has {good} good texts and {n - good} bad ones; give at least one "
            "of each."
        )
    return judged


def split_pairs(pairs: Pairs) -> Judged:
    """Judge each text of a pair by itself: the chosen one is good, the rejected one bad."""
    n = len(pairs)
    prompts = pairs.prompts or [""] * n
    texts = [
        text.removeprefix(prompt)
        for side in (pairs.chosen, pairs.rejected)
        for prompt, text in zip(prompts, side, strict=True)
    ]
    return Judged(prompts * 2, texts, np.arange(2 * n) < n, np.arange(2 * n) % n)


def _of_rows(rows: list[Row], prompt_column: str | None) -> Judged:
    """Rows of a response and its label, with a prompt or without."""
    if prompt_column is None and rows and _has(rows[0], "prompt"):
        prompt_column = "prompt"
    prompts = ["" if prompt_column is None else row.text(prompt_column) for row in rows]
    texts = [row.text(next((c for c in RESPONSES if _has(row, c)), "response")) for row in rows]
    is_good = np.array([_label(row) for row in rows], dtype=bool)
    if prompt_column is None:
        return Judged(prompts, texts, is_good, np.arange(len(rows)))
    _, groups = np.unique(prompts, return_inverse=True)
    return Judged(prompts, texts, is_good, groups)


def _has(row: Row, column: str) -> bool:
    """Whether a row has a column."""
    return isinstance(row.fields, dict) and column in row.fields


def _label(row: Row) -> bool:
    """How a text was judged, in one of several spellings.

    Raises:
        LoadError: there is no label, or another.
    """
    found = row.fields.get(LABEL) if isinstance(row.fields, dict) else None
    word = str(found).strip().lower() if isinstance(found, str | bool | int) else ""
    if word not in WORDS:
        raise LoadError(
            f"{row.where} has {found!r:.40} under {LABEL!r}; every row needs one of "
            f"{', '.join(WORDS)}."
        )
    return WORDS[word]
