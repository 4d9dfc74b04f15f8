"""Texts labeled good or bad one by one, for KTO: from a file, or from preference pairs."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from rlhf_lab.data_sources import LABEL, Row, find_prompt_column, read_rows
from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.rewards.pairs import REEL, Columns, Pairs, load_pairs, without_prompts
from rlhf_lab.supervised import hold_out

WORDS = {"good": True, "true": True, "1": True, "bad": False, "false": False, "0": False}


@dataclass(frozen=True)
class LabeledExamples(Columns):
    """Responses to prompts, each labeled good or bad.

    Args:
        prompts: context that is not learned; empty if a text has no prompt.
        texts: labeled texts, appended to their prompts without a space.
        is_good: True for a good text.
        groups: group number of each text (the two of a pair, the responses to one prompt); a group
            is held out as a whole.

    Raises ConfigError for labels that are not True or False, and unless there are both.
    """

    prompts: list[str]
    texts: list[str]
    is_good: Bool[np.ndarray, " example"]
    groups: Int[np.ndarray, " example"]

    def __post_init__(self) -> None:
        super().__post_init__()
        labels = np.array(self.is_good, dtype=None if len(self) else bool)
        if labels.dtype != bool:
            raise ConfigError(f"is_good has {labels.dtype.name} entries. Pass True and False.")
        if not 0 < (good := int(labels.sum())) < len(self):
            counts = f"{good} good texts and {len(self) - good} bad ones"
            raise ConfigError(f"The examples have {counts}. Use at least one of each.")

    def hold_out(
        self, fraction: float, rng: np.random.Generator
    ) -> tuple[Int[np.ndarray, " held_out"], Int[np.ndarray, " train"]]:
        """Split the texts into held-out and training rows by group; one by one if all share one."""
        groups = np.unique(self.groups)
        if len(groups) < 2:
            return hold_out(len(self), fraction, rng)
        chosen, _ = hold_out(len(groups), fraction, rng)
        is_held_out = np.isin(self.groups, groups[chosen])
        return np.flatnonzero(is_held_out), np.flatnonzero(~is_held_out)


def load_labeled_examples(
    name: str, n_pairs: int, seed: int, prompt_column: str | None = None
) -> LabeledExamples:
    """Load labeled texts by the name of their source.

    Args:
        name: "reel", whose pairs are split; or a file or hub:NAME:SPLIT with the columns label and
            response (or completion), or chosen and rejected.
        n_pairs, seed: number and seed of the pairs; Reel's only.
        prompt_column: column of the prompts; if None, the column prompt of single responses.

    Raises:
        LoadError: If the source does not exist, or a row is not valid.
        ConfigError: As `LabeledExamples`.
    """
    rows = [] if name == REEL else read_rows(name, "examples")
    columns = [name for name in ("chosen", "response", "completion") if rows and rows[0].has(name)]
    if len(columns) > 1:
        raise LoadError(f"{rows[0].where} has {' and '.join(columns)}. Keep one of them.")
    if name == REEL or columns == ["chosen"]:
        return split_pairs(load_pairs(name, n_pairs, seed, prompt_column))
    return _read_labeled_rows(rows, prompt_column, columns[0] if columns else "response")


def split_pairs(pairs: Pairs) -> LabeledExamples:
    """Label the chosen text of each pair as good and the rejected one as bad."""
    n = len(pairs)
    prompts = (pairs.prompts or [""] * n) * 2
    texts = without_prompts(prompts, pairs.chosen + pairs.rejected)
    return LabeledExamples(prompts, texts, np.arange(2 * n) < n, np.arange(2 * n) % n)


def _read_labeled_rows(rows: list[Row], prompt_column: str | None, column: str) -> LabeledExamples:
    prompt_column = find_prompt_column(rows, prompt_column)
    prompts = ["" if prompt_column is None else row.text(prompt_column) for row in rows]
    texts = without_prompts(prompts, [row.text(column) for row in rows])
    groups = np.arange(len(rows))
    if prompt_column is not None:
        _, groups = np.unique(prompts, return_inverse=True)
    is_good = np.array([_read_label(row) for row in rows], dtype=bool)
    return LabeledExamples(prompts, texts, is_good, groups)


def _read_label(row: Row) -> bool:
    label = row.fields[LABEL] if row.has(LABEL) else None
    word = str(label).strip().lower()
    if word not in WORDS:
        raise LoadError(f"{row.where} has {label!r:.40} under {LABEL!r}. Use {', '.join(WORDS)}.")
    return WORDS[word]
