"""What the policy continues: prompts from a file or a list, dealt out in a seeded order."""

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from rlhf_lab.errors import ConfigError, LoadError
from rlhf_lab.training.streams import phase_generator

COLUMN = "prompt"


def load_prompts(path: str | Path) -> list[str]:
    """The prompts of a file: the column `prompt` of .jsonl or .csv, else one per line, blanks left.

    Raises:
        LoadError: no such file, or one sentence on the first line that has no prompt.
    """
    path = Path(path)
    readers = {".jsonl": _json_prompts, ".csv": _csv_prompts}
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = file.read().rstrip("\n").split("\n")
    except OSError as error:
        raise LoadError(
            f"cannot read prompts={str(path)!r} ({error.strerror}); give a .txt, .jsonl or .csv "
            "file."
        ) from None
    except UnicodeDecodeError as error:
        raise LoadError(f"{path} is no text file of prompts ({error}); save it as UTF-8.") from None
    if path.suffix in readers:
        return list(readers[path.suffix](lines, path))
    return [line for line in lines if line.strip()]


def _json_prompts(lines: list[str], path: Path) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise LoadError(f"{path}, line {number} is not JSON ({error}); mend it.") from None
        yield _checked(row.get(COLUMN) if isinstance(row, dict) else None, path, number)


def _csv_prompts(lines: list[str], path: Path) -> Iterator[str]:
    rows = csv.DictReader(line + "\n" for line in lines)
    for row in rows:
        yield _checked(row.get(COLUMN), path, rows.line_num)


def _checked(prompt: object, path: Path, number: int) -> str:
    """A prompt that is a text, or the complaint about its line."""
    if not isinstance(prompt, str) or not prompt.strip():
        raise LoadError(
            f"{path}, line {number} has no text under {COLUMN!r}; every row needs that column."
        )
    return prompt


def choose_prompts(prefix: str, file: str | None, given: Sequence[str] | None) -> list[str]:
    """The texts to continue: those handed in, those of the file, or the prefix alone.

    Raises:
        ConfigError: not one text, or something that is no text.
        LoadError: see `load_prompts`.
    """
    if given is None and file is None:
        return [prefix]
    texts = load_prompts(file) if given is None else given
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise ConfigError("prompts must be a list of texts; put a single one in a list.")
    if not texts:
        raise ConfigError(f"prompts={file!r} holds no prompt; give at least one.")
    return list(texts)


def deal(n_prompts: int, start: int, count: int, seed: int) -> list[int]:
    """Which prompts come at places `start` to `start + count` of a run's endless order.

    1. Each time round, all prompts come once, in an order of that round's own.
    2. A place tells its round and its rank in it, so that nothing has to be remembered.
    """
    orders: dict[int, list[int]] = {}
    dealt = []
    for place in range(start, start + count):
        turn, rank = divmod(place, n_prompts)
        if turn not in orders:
            generator = phase_generator(seed, turn, "prompts")
            orders[turn] = torch.randperm(n_prompts, generator=generator).tolist()
        dealt.append(orders[turn][rank])
    return dealt
