"""The maker of lesson 07's record: runs with one setting changed each, and what each ends at."""

import json
import sys
from pathlib import Path
from typing import Any

from rlhf_lab import RLHFArgs, RLHFTrainer
from tools.course.run_settings import RUN_SETTINGS

RECORD = Path("rlhf_lab", "course", "records", "symptoms.json")
SYMPTOM_SEEDS = (1, 2, 3)
SYMPTOM_SETTINGS: dict[str, Any] = {
    **RUN_SETTINGS,
    "total_phases": 12,
    "kl_coef": 0.3,
}
CAUSES: dict[str, dict[str, Any]] = {
    "nothing is wrong": {},
    "learning rates a tenth": {"base_lr": 3e-5, "head_lr": 3e-4},
    "kl_coef 0": {"kl_coef": 0.0},
    "kl_coef 10": {"kl_coef": 10.0},
    "clip_coef 0.001": {"clip_coef": 0.001},
    "8 passes over each batch": {"batches_per_learning_phase": 8},
    "ent_coef 0.3": {"ent_coef": 0.3},
    "value head does not learn": {"head_lr": 0.0},
    "vf_coef 10": {"vf_coef": 10.0},
    "sampled at temperature 0.3": {"temperature": 0.3},
    "a reward that no text changes": {"reward_fn": "length"},
}
COLUMNS = {
    "reward": "mean_reward",
    "true_reward": "true_reward",
    "grammatical": "grammatical_fraction",
    "KL": "kl_per_sequence",
    "entropy": "entropy_per_token",
    "explained variance": "explained_variance",
    "clipped": "clip_fraction",
    "gradient norm": "grad_norm",
}
LAST = 3
"""The phases at the end whose mean is stored."""


def symptoms_of(cause: str, seed: int) -> dict[str, float]:
    """Train once with a setting changed; every figure's mean over the last phases."""
    args = RLHFArgs(**SYMPTOM_SETTINGS | CAUSES[cause] | {"seed": seed})
    last = RLHFTrainer(args).train()[-LAST:]
    return {name: sum(getattr(r, field) for r in last) / LAST for name, field in COLUMNS.items()}


def make_symptoms(path: Path) -> None:
    """Train with every cause once per seed, and write the figures, rounded to 5 digits."""
    runs = {}
    for cause in CAUSES:
        every = [symptoms_of(cause, seed) for seed in SYMPTOM_SEEDS]
        runs[cause] = {name: [round(one[name], 5) for one in every] for name in COLUMNS}
    record = {
        "made_by": "python -m tools.course.symptoms",
        "settings": SYMPTOM_SETTINGS,
        "changes": CAUSES,
        "seeds": SYMPTOM_SEEDS,
        "last_phases": LAST,
        "runs": runs,
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(make_symptoms(RECORD))
