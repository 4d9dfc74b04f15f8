"""The optimizer and its schedule, compared with hand-computed steps and factors."""

import pytest
import torch

from rlhf_lab.models import HookedTransformer, ModelConfig, TransformerWithValueHead
from rlhf_lab.training import get_optimizer, lr_scale


@pytest.fixture
def tiny_policy() -> TransformerWithValueHead:
    sizes = {"d_model": 4, "n_ctx": 8, "d_head": 2, "n_heads": 2, "d_vocab": 5}
    cfg = ModelConfig(n_layers=1, act_fn="gelu", seed=0, **sizes)
    return TransformerWithValueHead(HookedTransformer(cfg))


def test_two_groups_step_up_by_their_learning_rates(tiny_policy, copy_parameters):
    """Adam's first step is lr * g / |g|; the objective -sum (p - 30)^2 has g = 2 (30 - p) > 0."""
    before = copy_parameters(tiny_policy)
    optimizer = get_optimizer(tiny_policy, base_lr=0.1, head_lr=0.01, weight_decay=0.0)
    base, head = optimizer.param_groups
    assert {id(p) for p in base["params"]} == {id(p) for p in tiny_policy.base_model.parameters()}
    assert {id(p) for p in head["params"]} == {id(p) for p in tiny_policy.value_head.parameters()}
    (-sum((p - 30).square().sum() for p in tiny_policy.parameters())).backward()
    optimizer.step()
    for name, parameter in tiny_policy.named_parameters():
        step = 0.1 if name.startswith("base_model") else 0.01
        torch.testing.assert_close(parameter.detach(), before[name] + step, rtol=0, atol=1e-5)


def test_weight_decay_multiplies_weights_and_not_gradients(tiny_policy, copy_parameters):
    """With gradient 0, AdamW's step is p * (1 - 0.1 * 0.5) = 0.95 p."""
    before = copy_parameters(tiny_policy)
    optimizer = get_optimizer(tiny_policy, base_lr=0.1, head_lr=0.1, weight_decay=0.5)
    (0.0 * sum(p.sum() for p in tiny_policy.parameters())).backward()
    optimizer.step()
    for name, parameter in tiny_policy.named_parameters():
        torch.testing.assert_close(parameter.detach(), 0.95 * before[name])


@pytest.mark.parametrize(
    ("phases", "warmup", "total", "final_scale", "expected"),
    [
        (range(8), 3, 8, 0.1, [0.25, 0.5, 0.75, 1.0, 0.775, 0.55, 0.325, 0.1]),
        (range(5), 4, 5, 0.1, [0.2, 0.4, 0.6, 0.8, 1.0]),
        ([0, 230], 20, 200, 0.1, [1 / 21, 0.1]),  # the seed notebook had 0 and -0.05
        ([0, 4, 7], 0, 5, 0.0, [1.0, 0.0, 0.0]),
        ([0, 7], 0, 1, 0.1, [1.0, 1.0]),
    ],
)
def test_scale_rises_to_one_and_falls_to_the_final_scale(
    phases, warmup, total, final_scale, expected
):
    """Warm-up of 3: 1/4, 2/4, 3/4, then 1; then 1 - 0.9 i / 4 over the remaining 4 phases."""
    found = [lr_scale(phase, warmup, total, final_scale) for phase in phases]
    assert found == pytest.approx(expected)


@pytest.mark.slow
def test_run_steps_the_schedule_once_per_phase(make_trainer):
    """Warm-up 1 of 3 phases, final scale 0.1: factors 1/2, 1, 0.1, each for all 4 steps."""
    trainer, used = make_trainer(total_phases=3, base_lr=0.002, head_lr=0.02), []

    @trainer.on("after_step")
    def note(ctx):
        used.append([group["lr"] for group in trainer.optimizer.param_groups])

    reports = trainer.train()
    expected = [[0.001, 0.01], [0.002, 0.02], [0.0002, 0.002]]
    assert [[r.base_lr, r.head_lr] for r in reports] == [pytest.approx(e) for e in expected]
    assert used == [pytest.approx(rates) for rates in expected for _ in range(4)]
