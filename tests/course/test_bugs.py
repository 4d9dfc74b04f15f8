"""The bug hunt's broken runs are broken as they say."""

from pathlib import Path

import pytest
import torch

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.course.bugs import broken_parts, culprit, reveal
from rlhf_lab.course.debugging import SUSPECTS

FIELDS = dict(preset="reel", device="cpu", batch_size=8, num_minibatches=2, total_phases=4)
ARGS = RLHFArgs(**FIELDS, gen_len=8, warmup_steps=1)


@pytest.mark.slow
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
    kl, mask = torch.tensor([[0.1, 0.4, 9.0]]), torch.tensor([[True, True, False]])
    penalty = broken_parts("C", ARGS)["kl_penalty"](kl, 2.0, mask)
    assert penalty.item() == pytest.approx(-2 * 0.25)


def test_each_broken_run_has_a_culprit_of_its_own_among_the_suspects() -> None:
    named = [culprit(run) for run in ("A", "B", "C")]
    assert len(set(named)) == 3 and set(named) <= set(SUSPECTS)
    assert "rewards.roll(1)" in reveal("B") and "-kl_coef" in reveal("C")
