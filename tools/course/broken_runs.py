"""The maker of stored dashboards: healthy and broken runs of lesson 06's settings, over seeds."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course.bugs import SUSPECTS, broken_parts
from rlhf_lab.course.dashboards import dashboard_of
from rlhf_lab.course.ladder import shifted_logprobs
from rlhf_lab.functional import (
    calc_value_function_loss,
    compute_gae,
    token_rewards,
)
from tools.course.run_settings import RUN_SETTINGS
from tools.course.stored_parts import in_rows, rounded

RECORD = Path("rlhf_lab", "course", "records", "dashboards.json")
BROKEN_SEEDS = (1, 2, 3)
BROKEN_SETTINGS: dict[str, Any] = {
    **RUN_SETTINGS,
    "total_phases": 8,
    "kl_coef": 0.3,
}
BrokenParts = Callable[[RLHFArgs], dict[str, Any]]


def _changed_advantages(change: Callable[[Tensor], Tensor]) -> BrokenParts:
    def parts(args: RLHFArgs) -> dict[str, Any]:
        def advantages(values: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
            paid = token_rewards(rewards, mask)
            return change(compute_gae(values, paid, args.gamma, args.gae_lambda, mask))

        return {"advantages": advantages}

    return parts


def _rising_value_loss(args: RLHFArgs) -> dict[str, Any]:
    def value_loss(
        values: Tensor,
        returns: Tensor,
        vf_coef: float,
        mask: Tensor,
        old_values: Tensor,
        clip: float | None,
    ) -> Tensor:
        return -calc_value_function_loss(values, returns, vf_coef, mask, old_values, clip)

    return {"value_loss": value_loss}


def _run(name: str) -> BrokenParts:
    return lambda args: broken_parts(name, args)


BROKEN_KINDS: dict[str, tuple[dict[str, float], BrokenParts]] = {
    "healthy": ({}, lambda args: {}),
    SUSPECTS[0]: ({"base_lr": 0.0, "head_lr": 0.0}, lambda args: {}),
    SUSPECTS[1]: ({}, lambda args: {"logprobs": shifted_logprobs}),
    SUSPECTS[2]: ({}, _changed_advantages(lambda x: -x)),
    SUSPECTS[3]: ({}, _changed_advantages(lambda x: x.roll(1, dims=1))),
    SUSPECTS[4]: ({}, _run("B")),
    SUSPECTS[5]: ({}, _rising_value_loss),
    SUSPECTS[6]: ({}, _run("C")),
    SUSPECTS[7]: ({}, _run("A")),
}


def make_dashboards(path: Path) -> None:
    """Train every kind once per seed, and write the dashboards, rounded to 5 digits."""
    runs: dict[str, list[Any]] = {kind: [] for kind in BROKEN_KINDS}
    for kind, (fields, parts) in BROKEN_KINDS.items():
        for seed in BROKEN_SEEDS:
            args = RLHFArgs(**BROKEN_SETTINGS | fields, seed=seed)
            found = dashboard_of(RLHFTrainer(args, **parts(args)).train())
            runs[kind].append(rounded(found, 5))
    record = {
        "made_by": "python -m tools.course.broken_runs",
        "settings": BROKEN_SETTINGS,
        "seeds": BROKEN_SEEDS,
        "runs": runs,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(in_rows(record), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(make_dashboards(RECORD))
