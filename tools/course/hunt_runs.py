"""The maker of lesson 06's other record: climbs of the ladder, other healthy runs, and texts.

python -m tools.course.hunt_runs
python -m tools.course.hunt_runs climbs
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course import new_run
from rlhf_lab.course.bugs import culprit
from rlhf_lab.course.dashboards import dashboard_of
from rlhf_lab.course.ladder import LADDER_FIELDS, RUNGS, WRONG_CLIMBERS, climb
from tools.course.broken_runs import BROKEN_KINDS, BROKEN_SEEDS, BROKEN_SETTINGS
from tools.course.stored_parts import write_parts

HUNT_RECORD = Path("rlhf_lab", "course", "records", "bug_hunt.json")
HEALTHY_OTHERS = {
    "half the learning rate": {"base_lr": RLHFArgs(preset="reel").base_lr / 2},
    "3 times the KL penalty": {"kl_coef": 3 * BROKEN_SETTINGS["kl_coef"]},
}
TEXTS_OF_EACH = 3


def climbs() -> dict[str, list[dict[str, float]]]:
    """Every trainer on every rung, once per seed."""
    climbers: dict[str, Any] = {"healthy": {}, **WRONG_CLIMBERS}
    return {
        name: [
            {rung: climb(BROKEN_SETTINGS | {"seed": seed}, rung, parts) for rung in RUNGS}
            for seed in BROKEN_SEEDS
        ]
        for name, parts in climbers.items()
    }


def other_healthy_runs() -> dict[str, list[dict[str, list[float]]]]:
    """Dashboards of healthy runs at other settings, once per seed."""
    return {
        kind: [
            dashboard_of(
                RLHFTrainer(
                    RLHFArgs(**BROKEN_SETTINGS | change, seed=seed), out=new_run("other")
                ).train()
            )
            for seed in BROKEN_SEEDS
        ]
        for kind, change in HEALTHY_OTHERS.items()
    }


def texts() -> dict[str, list[tuple[float, str]]]:
    """Reward and text of reviews that broken runs of the first seed write after their last step."""
    found = {}
    for kind in [culprit(run) for run in ("A", "B", "C")]:
        args = RLHFArgs(**BROKEN_SETTINGS, seed=BROKEN_SEEDS[0])
        trainer = RLHFTrainer(args, out=new_run("bug"), **BROKEN_KINDS[kind][1](args))
        trainer.train()
        written = trainer.rollout_phase()
        rows = list(zip(written.raw_rewards.tolist(), written.texts, strict=True))
        found[kind] = rows[:TEXTS_OF_EACH]
    return found


HUNT_PARTS: dict[str, Callable[[], Any]] = {
    "climbs": climbs,
    "others": other_healthy_runs,
    "texts": texts,
}


def make_hunt(path: Path, parts: list[str]) -> None:
    """Make some parts of the record anew, as `write_parts` does, rounded to 5 digits."""
    heading = {
        "made_by": "python -m tools.course.hunt_runs",
        "settings": BROKEN_SETTINGS,
        "ladder": dict(LADDER_FIELDS),
        "seeds": BROKEN_SEEDS,
    }
    write_parts(path, heading, HUNT_PARTS, parts, digits=5)


if __name__ == "__main__":
    sys.exit(make_hunt(HUNT_RECORD, sys.argv[1:]))
