"""The optimizer and its schedule, compared with hand-computed steps and factors."""

import pytest
import torch

from rlhf_lab.models import HookedTransformer, ModelConfig, TransformerWithValueHead
from rlhf_lab.training import get_optimizer, lr_scale
from tests.training.recorded_runs import copy_weights


@pytest.fixture
def tiny_policy() -> TransformerWithValueHead:
    sizes = {"d_model": 4, "n_ctx": 8, "d_head": 2, "n_heads": 2, "d_vocab": 5}
    cfg = ModelConfig(n_layers=1, act_fn="gelu", seed=0, **sizes)
    return TransformerWithValueHead(HookedTransformer(cfg))


def test_two_groups_step_up_by_their_learning_rates(tiny_policy):
    """Adam's first step is lr * g / |g|; the objective -sum (p - 30)^2 has g = 2 (30 - p) > 0."""
    before = copy_weights(tiny_policy)
    optimizer = get_optimizer(tiny_policy, base_lr=0.1, head_lr=0.01, weight_decay=0.0)
    base, head = optimizer.param_groups
    assert {id(p) for p in base["params"]} == {id(p) for p in tiny_policy.base_model.parameters()}
    assert {id(p) for p in head["params"]} == {id(p) for p in tiny_policy.value_head.parameters()}
    (-sum((p - 30).square().sum() for p in tiny_policy.parameters())).backward()
    optimizer.step()
    for name, parameter in tiny_policy.named_parameters():
        step = 0.1 if name.startswith("base_model") else 0.01
        torch.testing.assert_close(parameter.detach(), before[name] + step, rtol=0, atol=1e-5)


def test_scale_rises_to_one_and_falls_to_the_final_scale():
    """Warm-up of 3: 1/4, 2/4, 3/4, then 1; then 1 - 0.9 i / 4 over the remaining 4 phases."""
    for phases, warmup, total, final_scale, expected in (
        (range(8), 3, 8, 0.1, [0.25, 0.5, 0.75, 1.0, 0.775, 0.55, 0.325, 0.1]),
        (range(5), 4, 5, 0.1, [0.2, 0.4, 0.6, 0.8, 1.0]),
        ([0, 230], 20, 200, 0.1, [1 / 21, 0.1]),  # the seed notebook had 0 and -0.05
        ([0, 4, 7], 0, 5, 0.0, [1.0, 0.0, 0.0]),
        ([0, 7], 0, 1, 0.1, [1.0, 1.0]),
    ):
        found = [lr_scale(phase, warmup, total, final_scale) for phase in phases]
        assert found == pytest.approx(expected)


@pytest.mark.slow
def test_run_steps_the_schedule_once_per_phase(runs):
    """Warm-up 1 of 5 phases, final scale 0.1: factors 1/2, 1, 0.7, 0.4, 0.1, for 4 steps each."""
    run = runs("plain")
    rates = [[1e-3 * x, run.trainer.args.head_lr * x] for x in (0.5, 1, 0.7, 0.4, 0.1)]
    assert [[r.base_lr, r.head_lr] for r in run.reports] == [pytest.approx(e) for e in rates]
    assert [step.rates for step in run.steps] == [pytest.approx(e) for e in rates for _ in range(4)]
