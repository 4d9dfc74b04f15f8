"""Record of dashboards for the appendix on debugging PPO: healthy and broken runs, over seeds."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course.debugging import (
    GAMMA,
    LAM,
    SUSPECTS,
    make_dashboard,
    one_token_late,
    shifted_logprobs,
)
from rlhf_lab.functional import (
    calc_kl_penalty,
    calc_value_function_loss,
    compute_gae,
    token_rewards,
)
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.training import PhaseReport
from tools.course.stored_parts import RUN_SETTINGS, SEEDS, make_record

BROKEN_SETTINGS: dict[str, Any] = {**RUN_SETTINGS, "total_phases": 8, "kl_coef": 0.3}
BrokenParts = Callable[[RLHFArgs], dict[str, Any]]


def _negative_advantages(values: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
    return -compute_gae(values, token_rewards(rewards, mask), GAMMA, LAM, mask)


def _shuffled_rewards(values: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
    return compute_gae(values, token_rewards(rewards.roll(1), mask), GAMMA, LAM, mask)


def _rewarded_kl(kl: Tensor, kl_coef: float, mask: Tensor) -> Tensor:
    return calc_kl_penalty(kl, -kl_coef, mask)


def _learning_reference(args: RLHFArgs) -> dict[str, Any]:
    policy = TransformerWithValueHead(load_model(args.base_model), seed=args.seed)
    return {"policy": policy, "reference": policy.base_model}


BROKEN_KINDS: dict[str, tuple[dict[str, float], BrokenParts]] = {
    "healthy": ({}, lambda args: {}),
    SUSPECTS[0]: ({"base_lr": 0.0, "head_lr": 0.0}, lambda args: {}),
    SUSPECTS[1]: ({}, lambda args: {"logprobs": shifted_logprobs}),
    SUSPECTS[2]: ({}, lambda args: {"advantages": _negative_advantages}),
    SUSPECTS[3]: ({}, lambda args: {"advantages": one_token_late}),
    SUSPECTS[4]: ({}, lambda args: {"advantages": _shuffled_rewards}),
    SUSPECTS[5]: ({}, lambda args: {"value_loss": lambda *x: -calc_value_function_loss(*x)}),
    SUSPECTS[6]: ({}, lambda args: {"kl_penalty": _rewarded_kl}),
    SUSPECTS[7]: ({}, _learning_reference),
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
