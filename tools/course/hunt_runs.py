"""Record of the bug hunt: climbs of the ladder, and other healthy runs.

`python -m tools.course.hunt_runs climbs` computes one part of two.
"""

from typing import Any

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course.debugging import (
    LADDER_FIELDS,
    RUNGS,
    WRONG_CLIMBERS,
    climb,
    make_dashboard,
)
from tools.course.broken_runs import BROKEN_SETTINGS
from tools.course.stored_parts import SEEDS, make_record

HEALTHY_OTHERS = {
    "half the learning rate": {"base_lr": RLHFArgs(preset="reel").base_lr / 2},
    "3 times the KL penalty": {"kl_coef": 3 * BROKEN_SETTINGS["kl_coef"]},
}


def climbs() -> dict[str, list[dict[str, float]]]:
    """Run every trainer on every rung, once per seed."""
    climbers: dict[str, Any] = {"healthy": {}, **WRONG_CLIMBERS}
    return {
        name: [
            {rung: climb(BROKEN_SETTINGS | {"seed": seed}, rung, parts) for rung in RUNGS}
            for seed in SEEDS
        ]
        for name, parts in climbers.items()
    }


def other_healthy_runs() -> dict[str, list[dict[str, list[float]]]]:
    """Train at other settings, once per seed; returns the dashboards."""
    return {
        kind: [
            make_dashboard(RLHFTrainer(RLHFArgs(**BROKEN_SETTINGS | change, seed=seed)).train())
            for seed in SEEDS
        ]
        for kind, change in HEALTHY_OTHERS.items()
    }


if __name__ == "__main__":
    make_record(
        "bug_hunt",
        "hunt_runs",
        {"climbs": climbs, "others": other_healthy_runs},
        settings=BROKEN_SETTINGS,
        ladder=dict(LADDER_FIELDS),
        seeds=SEEDS,
    )
