"""The leaderboard of blind tuning, as JSON next to the learner's progress file."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_lab.course.progress_file import progress_path, read_json, save_json
from rlhf_lab.course.tuned_run import normalize_name

TUNED_FIELDS = ("kl_coef", "base_lr", "total_phases", "batch_size")


@dataclass(frozen=True)
class TuningRow:
    """One run: its learner, its four fields, and its metrics on fresh reviews.

    Args:
        excess_kl: nats per review above the least KL with the same true reward; None if no policy
            of the frontier has this true reward.
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
        """Identity of the run: training is deterministic, so equal keys are one run."""
        return (normalize_name(self.name), *(getattr(self, field) for field in TUNED_FIELDS))


def leaderboard_path() -> Path:
    """Return the path of the leaderboard; the file need not exist."""
    progress = progress_path()
    return progress.with_name(f"{progress.stem}.blind_tuning.json")


def read_leaderboard() -> list[TuningRow]:
    """Return all rows in the order in which they were added, without invalid ones."""
    rows = read_json(leaderboard_path(), "rows", list)
    return [TuningRow(**row) for row in rows if _is_row(row)]


def _is_row(row: Any) -> bool:
    names = TuningRow.__dataclass_fields__
    if not isinstance(row, dict) or row.keys() != names.keys():
        return False
    numbers = [value for name, value in row.items() if name not in ("name", "excess_kl")]
    numbers += [] if row["excess_kl"] is None else [row["excess_kl"]]
    return isinstance(row["name"], str) and all(type(x) in (int, float) for x in numbers)


def add_to_leaderboard(row: TuningRow) -> str | None:
    """Add a row, which replaces the one with the same key. Return a message if that fails."""
    rows = [other for other in read_leaderboard() if other.key != row.key] + [row]
    content = {"version": 1, "rows": [asdict(each) for each in rows]}
    return save_json(leaderboard_path(), content, "the row")
