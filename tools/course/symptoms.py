"""Record of symptoms: runs with one setting changed, and their last metrics."""

from typing import Any

from rlhf_lab import RLHFArgs, RLHFTrainer
from tools.course.stored_parts import RUN_SETTINGS, SEEDS, columns, make_record

SETTINGS: dict[str, Any] = {**RUN_SETTINGS, "total_phases": 12, "kl_coef": 0.3}
CAUSES: dict[str, dict[str, Any]] = {
    "nothing is wrong": {},
    "kl_coef 0": {"kl_coef": 0.0},
    "clip_coef 0.001": {"clip_coef": 0.001},
    "value head does not learn": {"head_lr": 0.0},
}
COLUMNS = {
    "reward": "mean_reward",
    "true_reward": "true_reward",
    "KL": "kl_per_sequence",
    "explained variance": "explained_variance",
    "clipped": "clip_fraction",
}
LAST_PHASES = 3


def last_metrics(cause: str, seed: int) -> dict[str, float]:
    """Train once with a setting changed; returns the mean of each metric over the last phases."""
    args = RLHFArgs(**SETTINGS | CAUSES[cause] | {"seed": seed})
    last = RLHFTrainer(args).train()[-LAST_PHASES:]
    return {
        name: sum(getattr(report, field) for report in last) / LAST_PHASES
        for name, field in COLUMNS.items()
    }


if __name__ == "__main__":
    parts = {"runs": lambda: columns(last_metrics, *CAUSES)}
    heading = {"changes": CAUSES, "seeds": SEEDS, "last_phases": LAST_PHASES}
    make_record("symptoms", "symptoms", parts, settings=SETTINGS, **heading)
