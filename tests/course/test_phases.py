"""Lesson 06's phases do what the trainer's own do, and its broken runs are broken as they say."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course.bugs import SUSPECTS, broken_parts, culprit, reveal
from rlhf_lab.course.phases import learning_phase, rollout_phase

FIELDS = dict(preset="reel", device="cpu", batch_size=8, num_minibatches=2, total_phases=4)
ARGS = RLHFArgs(**FIELDS, gen_len=8, warmup_steps=1)


class PlainTrainer(RLHFTrainer):
    """The trainer with the lesson's phases in place of its own."""

    rollout_phase = rollout_phase
    learning_phase = learning_phase


def weights(trainer: RLHFTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.policy.named_parameters()}


def runs(tmp_path: Path, **fields: Any) -> list[tuple[list, RLHFTrainer]]:
    args = RLHFArgs(**ARGS.to_dict() | fields)
    trainers = [kind(args, out=tmp_path / kind.__name__) for kind in (RLHFTrainer, PlainTrainer)]
    return [([trainer.run_phase() for _ in range(2)], trainer) for trainer in trainers]


@pytest.mark.parametrize(
    "fields",
    [{}, {"top_k": 5, "temperature": 0.8, "normalize_reward": False, "advantages": "one_step"}],
    ids=["preset", "truncated, one step"],
)
def test_the_plain_phases_give_the_same_weights_and_reports_bit_for_bit(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    (own_reports, own), (plain_reports, plain) = runs(tmp_path, **fields)
    for name, weight in weights(own).items():
        assert torch.equal(weight, weights(plain)[name]), name
    for ours, theirs in zip(own_reports, plain_reports, strict=True):
        unknown = {"gold_reward": None, "grammatical_fraction": None}
        assert dataclasses.replace(ours.rollout, **unknown) == theirs.rollout
        assert dataclasses.asdict(theirs.learning) == pytest.approx(
            dataclasses.asdict(ours.learning), rel=1e-6
        )


def test_the_phases_change_the_policy(tmp_path: Path) -> None:
    """Equal weights above would prove nothing if nothing had moved."""
    trainer = PlainTrainer(ARGS, out=tmp_path / "run")
    before = weights(trainer)
    trainer.run_phase()
    assert all(not torch.equal(before[name], weight) for name, weight in weights(trainer).items())


def test_run_a_is_compared_with_itself_while_it_learns(tmp_path: Path) -> None:
    parts = broken_parts("A", ARGS)
    before = {name: p.detach().clone() for name, p in parts["policy"].named_parameters()}
    trainer = RLHFTrainer(ARGS, out=tmp_path / "run", **parts)
    trainer.run_phase()
    assert trainer.rollout_phase().kl.abs().max() == 0
    assert not torch.equal(before["base_model.unembed.W_U"], trainer.policy.base_model.unembed.W_U)


def test_run_b_gives_each_sequence_the_reward_of_the_one_before_it() -> None:
    """With values of 0 an advantage is the reward, times 0.95 for each token that it is away.

    Rewards 1, 2, 3 become 3, 1, 2; the second row has one real token.
    """
    args = RLHFArgs(**FIELDS, gen_len=2, warmup_steps=1)
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    rewards = torch.tensor([1.0, 2.0, 3.0])
    advantages = broken_parts("B", args)["advantages"](torch.zeros(3, 2), rewards, mask)
    expected = torch.tensor([[0.95 * 3, 3.0], [1.0, 0.0], [0.95 * 2, 2.0]])
    assert torch.allclose(advantages, expected)


def test_run_c_is_paid_for_its_distance_from_the_reference() -> None:
    """KL((0.75, 0.25) || (0.5, 0.5)) = 0.75 log 1.5 + 0.25 log 0.5 = 0.304099 - 0.173287."""
    logits = torch.tensor([[[0.75, 0.25]]]).log()
    mask = torch.ones(1, 1, dtype=torch.bool)
    penalty = broken_parts("C", ARGS)["kl_penalty"](logits, torch.zeros(1, 1, 2), 2.0, mask)
    assert penalty.item() == pytest.approx(-2 * 0.130812, abs=1e-5)


def test_each_broken_run_has_a_culprit_of_its_own_among_the_suspects() -> None:
    named = [culprit(run) for run in ("A", "B", "C")]
    assert len(set(named)) == 3 and set(named) <= set(SUSPECTS)
    assert "rewards.roll(1)" in reveal("B") and "-kl_coef" in reveal("C")
