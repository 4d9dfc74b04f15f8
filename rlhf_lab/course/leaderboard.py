"""The leaderboard of blind tuning, as JSON beside the learner's progress file."""

import contextlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rlhf_lab.course.progress_file import progress_path, save_json

LEADERBOARD_VERSION = 1


@dataclass(frozen=True)
class TuningRow:
    """One run: who tuned it, the four fields, and what it reached on fresh reviews.

    Args:
        excess_kl: nats per review beyond the cheapest policy of the same true reward; None where
            the true reward is outside what such a policy can have.
    """

    name: str
    kl_coef: float
    base_lr: float
    total_phases: int
    batch_size: int
    reward: float
    true_reward: float
    true_reward_low: float
    true_reward_high: float
    kl: float
    excess_kl: float | None

    @property
    def key(self) -> tuple[object, ...]:
        """Two runs with the same key are one run: training is the same each time."""
        fields_set = (self.kl_coef, self.base_lr, self.total_phases, self.batch_size)
        return (plain_name(self.name), *fields_set)


_FIELDS = fields(TuningRow)


def plain_name(name: str) -> str:
    """A name without its case, and without more than one space between its words."""
    return " ".join(name.casefold().split())


def leaderboard_path() -> Path:
    """Where the leaderboard is, beside the progress file; it need not exist."""
    progress = progress_path()
    return progress.with_name(f"{progress.stem}.blind_tuning.json")


def read_leaderboard() -> list[TuningRow]:
    """All rows, in the order in which they were added; what cannot be understood is left out.

    A file that is no leaderboard at all is put aside, with `.unreadable` behind its name.
    """
    path = leaderboard_path()
    try:
        if not path.is_file():
            return []
        stored = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return [row for one in stored if (row := _row(one)) is not None]
    except OSError:
        return []
    except (ValueError, KeyError, TypeError):
        with contextlib.suppress(OSError):
            path.replace(path.with_name(path.name + ".unreadable"))
        return []


def _row(stored: Any) -> TuningRow | None:
    """A row of the file, or None if a value is missing or of the wrong kind."""
    try:
        return TuningRow(**{one.name: _as_kind(stored[one.name], one.type) for one in _FIELDS})
    except (KeyError, TypeError):
        return None


def _as_kind(value: Any, kind: Any) -> Any:
    """A value of the file as one of a field's kind: a whole number may stand for a float.

    Raises:
        TypeError: it is of another kind.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and kind is not str and (kind is not int or isinstance(value, int)):
        return value if kind is int else float(value)
    if (kind is str and isinstance(value, str)) or (value is None and kind == float | None):
        return value
    raise TypeError


def add_to_leaderboard(row: TuningRow) -> str | None:
    """Add a row; it takes the place of one with the same key. Returns what went wrong.

    The file is replaced in one step; a full or read-only disk costs the row, not the run.
    """
    rows = [one for one in read_leaderboard() if one.key != row.key] + [row]
    content = {"version": LEADERBOARD_VERSION, "rows": [asdict(one) for one in rows]}
    return save_json(leaderboard_path(), content, "the row")
