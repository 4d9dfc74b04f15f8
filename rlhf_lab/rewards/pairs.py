"""Preference pairs: two texts, one of which was preferred, from a file, Reel or a dataset hub."""

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from rlhf_lab.errors import ConfigError, LoadError
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
    """

    chosen: list[str]
    rejected: list[str]
    gold_gaps: Float[np.ndarray, " pair"] | None = None

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, rows: Int[np.ndarray, " rows"]) -> "Pairs":
        """Some of the pairs."""
        gaps = None if self.gold_gaps is None else self.gold_gaps[rows]
        return Pairs([self.chosen[i] for i in rows], [self.rejected[i] for i in rows], gaps)

    def bayes_accuracy(self) -> float | None:
        """How often the best possible judge would agree with who won, on average.

        mean max(sigmoid(d), sigmoid(-d)), d the gap of the true rewards; None where it is unknown.
        """
        if self.gold_gaps is None:
            return None
        return float(sigmoid(np.abs(self.gold_gaps)).mean())


def load_pairs(name: str, n_pairs: int, seed: int) -> Pairs:
    """The pairs that a name stands for.

    Args:
        name: a .jsonl or .csv file with the columns chosen and rejected, "reel", or the id of a
            dataset on the hub, for which the datasets package has to be installed.
        n_pairs, seed: how many pairs to write and from what seed; Reel's only.

    Raises:
        LoadError: no such file or dataset, or not one of pairs.
        ConfigError: fewer than 2 pairs.
    """
    if name == REEL:
        pairs = reel_pairs(n_pairs, seed)
    elif name.endswith((".jsonl", ".csv")) or Path(name).exists():
        pairs = read_pairs(Path(name))
    else:
        pairs = hub_pairs(name)
    if len(pairs) < 2:
        raise ConfigError(f"pairs={name!r} has {len(pairs)} pairs; give at least 2.")
    return pairs


def reel_pairs(n: int, seed: int) -> Pairs:
    """Pairs of fresh Reel reviews, judged by a Bradley-Terry rater who knows the truth.

    1. Write 2 n reviews.
    2. The first of a pair wins with probability sigmoid(d), d the difference of the two gold
       logits, log P(y=+ | review) - log P(y=- | review).
    """
    if n < 2:
        raise ConfigError(f"n_pairs={n} is too small; write at least 2.")
    rng, grammar = np.random.default_rng(seed), Grammar()
    texts = grammar.sample(2 * n, rng).texts()
    logits = sentiment_logit(read_features(texts, grammar))
    gaps = logits[:n] - logits[n:]
    first_wins = rng.random(n) < sigmoid(gaps)
    pairs = [
        (one, other) if wins else (other, one)
        for one, other, wins in zip(texts[:n], texts[n:], first_wins, strict=True)
    ]
    chosen, rejected = map(list, zip(*pairs, strict=True))
    return Pairs(chosen, rejected, np.where(first_wins, gaps, -gaps))


def read_pairs(path: Path) -> Pairs:
    """The pairs of a JSONL or CSV file.

    Raises:
        LoadError: no such file, or one sentence on the first line that is no pair.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file) if path.suffix == ".csv" else _json_lines(file, path)
            first_line = 2 if path.suffix == ".csv" else 1
            return _collect(rows, f"{path}, line", first_line)
    except OSError as error:
        raise LoadError(
            f"cannot read the pairs in {path} ({error.strerror}); give a .jsonl or .csv file."
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise LoadError(f"{path} is no text file of pairs ({error}); save it as UTF-8.") from None


def _json_lines(lines: Iterable[str], path: Path) -> Iterator[Any]:
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise LoadError(f"{path}, line {number} is not JSON ({error}); mend it.") from None


def hub_pairs(name: str) -> Pairs:
    """The training split of a dataset on the hub with the columns chosen and rejected, as text.

    Raises:
        LoadError: the datasets package or the dataset is not there, or it holds no pairs of texts.
    """
    try:
        import datasets
    except ModuleNotFoundError:
        raise LoadError(
            f"there is no file {name!r}, and to look for a dataset of that name the datasets "
            "package is needed; pip install datasets, or give a .jsonl or .csv file."
        ) from None
    try:
        rows = datasets.load_dataset(name, split="train")
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LoadError(
            f"there is no file and no dataset {name!r} ({reason}); give a .jsonl or .csv file."
        ) from None
    return _collect(rows, f"{name}, row", 0)


def _collect(rows: Iterable[Any], where: str, first: int) -> Pairs:
    """Take chosen and rejected out of every row; `where` and the row's number name a bad one."""
    chosen, rejected = [], []
    for number, row in enumerate(rows, first):
        for field, texts in (("chosen", chosen), ("rejected", rejected)):
            text = row.get(field) if isinstance(row, dict) else None
            if not isinstance(text, str) or not text.strip():
                raise LoadError(
                    f"{where} {number} has no text under {field!r}; "
                    "every row needs the columns chosen and rejected."
                )
            texts.append(text)
    return Pairs(chosen, rejected)
