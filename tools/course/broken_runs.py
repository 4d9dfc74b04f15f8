"""Record of dashboards for the lesson on PPO: healthy and broken runs, over seeds."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course.bugs import broken_parts
from rlhf_lab.course.debugging import (
    GAMMA,
    LAM,
    SUSPECTS,
    make_dashboard,
    one_token_late,
    shifted_logprobs,
)
from rlhf_lab.functional import calc_value_function_loss, compute_gae, token_rewards
from rlhf_lab.training import PhaseReport
from tools.course.stored_parts import RUN_SETTINGS, SEEDS, make_record

BROKEN_SETTINGS: dict[str, Any] = {**RUN_SETTINGS, "total_phases": 8, "kl_coef": 0.3}
BrokenParts = Callable[[RLHFArgs], dict[str, Any]]


def _negative_advantages(values: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
    return -compute_gae(values, token_rewards(rewards, mask), GAMMA, LAM, mask)


BROKEN_KINDS: dict[str, tuple[dict[str, float], BrokenParts]] = {
    "healthy": ({}, lambda args: {}),
    SUSPECTS[0]: ({"base_lr": 0.0, "head_lr": 0.0}, lambda args: {}),
    SUSPECTS[1]: ({}, lambda args: {"logprobs": shifted_logprobs}),
    SUSPECTS[2]: ({}, lambda args: {"advantages": _negative_advantages}),
    SUSPECTS[3]: ({}, lambda args: {"advantages": one_token_late}),
    SUSPECTS[4]: ({}, partial(broken_parts, "B")),
    SUSPECTS[5]: ({}, lambda args: {"value_loss": lambda *x: -calc_value_function_loss(*x)}),
    SUSPECTS[6]: ({}, partial(broken_parts, "C")),
    SUSPECTS[7]: ({}, partial(broken_parts, "A")),
}


def train_broken(kind: str, seed: int) -> tuple[RLHFTrainer, list[PhaseReport]]:
    """Train one kind of run."""
    fields, parts = BROKEN_KINDS[kind]
    args = RLHFArgs(**BROKEN_SETTINGS | fields, seed=seed)
    trainer = RLHFTrainer(args, **parts(args))
    return trainer, trainer.train()


def dashboards() -> dict[str, list[Any]]:
    """Train every kind once per seed."""
    return {
        kind: [make_dashboard(train_broken(kind, seed)[1]) for seed in SEEDS]
        for kind in BROKEN_KINDS
    }


if __name__ == "__main__":
    parts = {"runs": dashboards}
    make_record("dashboards", "broken_runs", parts, settings=BROKEN_SETTINGS, seeds=SEEDS)
