"""Reward functions that fail or have side effects; rewards/test_scoring.py has their results."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf_lab import RLHFTrainer
from tests.bad_input.command_outcome import refuses, settings
from tests.bad_input.conftest import count_e, lines
from tests.training.recorded_runs import copy_weights, is_equal

pytestmark = pytest.mark.usefixtures("no_type_checks")


async def later(texts: list[str]) -> list[float]:
    return [0.0] * len(texts)


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize("reward_fn", [later, int, lambda t: 0.5, lambda t: np.full(len(t), 1e300)])
def test_trainer_rejects_a_reward_before_it_writes(here, idle, reward_fn) -> None:
    parts = {"out": "made", "policy": idle.policy, "reward_fn": reward_fn}
    refuses(lambda: RLHFTrainer(settings(total_phases=1), **parts), "reward_fn")
    assert not Path("made").exists()


def clear_texts(texts: list[str]) -> torch.Tensor:
    rewards = count_e(texts)
    texts.clear()
    return rewards


def change_modes(texts: list[str]) -> torch.Tensor:
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    np.random.seed(0)
    return count_e(texts).float()


@pytest.mark.parametrize("reward_fn", [clear_texts, change_modes])
def test_side_effects_of_a_reward_change_no_weight(here, plain, reward_fn) -> None:
    trainer = RLHFTrainer(settings(), out="made", reward_fn=reward_fn)
    try:
        trainer.train()
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
    assert is_equal(copy_weights(trainer.policy), plain)
    assert all(line["text"] for line in lines("made/samples.jsonl"))


def test_true_reward_with_a_wrong_result_is_named(idle) -> None:
    trainer = RLHFTrainer(settings(), policy=idle.policy, true_reward_fn=lambda texts: 0.5)
    refuses(trainer.rollout_phase, "true_reward_fn returned shape ()")
