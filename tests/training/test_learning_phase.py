"""A learning phase: orders of its passes, gradients of each minibatch, first ratio, and clip."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlhf_lab.training.optimization import PolicyUpdate, StepInBackward


@pytest.mark.slow
def test_minibatches_start_without_gradients_in_new_orders(make_trainer):
    trainer = make_trainer(base_lr=1e-2, warmup_steps=0, batches_per_learning_phase=2)
    left, rows = [], []
    gradients = lambda ctx: [p.grad for p in ctx.policy.parameters() if p.grad is not None]
    trainer.on("after_loss")(lambda ctx: left.append(gradients(ctx)))
    trainer.on("after_loss")(lambda ctx: rows.extend(ctx.minibatch.tokens.tolist()))
    report = trainer.run_phase()
    assert len(left) == 4 and not any(left)
    assert sorted(rows[:8]) == sorted(rows[8:]) and rows[:8] != rows[8:]
    assert report.ratio_first_minibatch == pytest.approx(1, abs=1e-4)
    assert report.approx_kl_per_token > 1e-3  # later minibatches have other ratios


@pytest.mark.parametrize("in_step", [False, True])
def test_clip_scales_gradients_of_model_and_value_head(monkeypatch, in_step):
    """Gradients of 1 in 6 + 3 numbers have norm 3, and 1/2 of norm 1.5; on CUDA after the step."""
    monkeypatch.setattr("rlhf_lab.training.optimization.CLIPS_IN_STEP", ("cpu",) * in_step)
    policy = nn.ModuleDict({"base_model": nn.Linear(2, 2), "value_head": nn.Linear(2, 1)}).double()
    policy.base_model = policy["base_model"]
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(policy.parameters(), fused=True)
    parts = {"step_in_backward": None, "policy": policy, "phase": 1, "optimizer": optimizer}
    update = PolicyUpdate(SimpleNamespace(**parts, world=None))
    assert update.clip(1.5).item() == pytest.approx(3)
    update.step()
    for parameter in policy.parameters():
        found = torch.stack([parameter.grad, 10 * optimizer.state[parameter]["exp_avg"]])
        torch.testing.assert_close(found, torch.full_like(found, 0.5), atol=1e-6, rtol=0)


def test_step_in_backward_steps_while_it_climbs_only():
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0, maximize=True)
    climber = StepInBackward(optimizer)
    update = PolicyUpdate(SimpleNamespace(step_in_backward=climber, optimizer=optimizer))
    assert climber.climb(3 * weight.sum(), update).item() == 3
    assert weight.item() == pytest.approx(1.1) and weight.grad is None
    (3 * weight.sum()).backward()
    assert weight.item() == pytest.approx(1.1) and weight.grad.item() == 3
