"""The optimiser and its schedule, against steps and factors worked by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_lab.models import HookedTransformer, ModelConfig, TransformerWithValueHead
from rlhf_lab.training import get_optimizer, get_optimizer_and_scheduler, lr_scale


@pytest.fixture
def tiny_policy() -> TransformerWithValueHead:
    sizes = {"d_model": 4, "n_ctx": 8, "d_head": 2, "n_heads": 2, "d_vocab": 5}
    cfg = ModelConfig(n_layers=1, act_fn="gelu", seed=0, **sizes)
    return TransformerWithValueHead(HookedTransformer(cfg))


def test_the_transformer_and_the_value_head_are_two_groups_with_their_own_learning_rate(
    tiny_policy,
):
    optimizer = get_optimizer(tiny_policy, base_lr=0.1, head_lr=0.01)
    base, head = optimizer.param_groups
    assert (base["lr"], head["lr"]) == (0.1, 0.01)
    assert {id(p) for p in base["params"]} == {id(p) for p in tiny_policy.base_model.parameters()}
    assert {id(p) for p in head["params"]} == {id(p) for p in tiny_policy.value_head.parameters()}
    assert len(base["params"]) + len(head["params"]) == len(list(tiny_policy.parameters()))


def test_one_step_goes_up_by_the_learning_rate_of_the_group(tiny_policy, copy_parameters):
    """Adam's first step is lr * g / |g|; the objective -sum (p - 30)^2 has g = 2 (30 - p) > 0."""
    before = copy_parameters(tiny_policy)
    optimizer = get_optimizer(tiny_policy, base_lr=0.1, head_lr=0.01, weight_decay=0.0)

    def objective() -> torch.Tensor:
        return -sum((p - 30).square().sum() for p in tiny_policy.parameters())

    first = objective()
    first.backward()
    optimizer.step()
    assert objective() > first
    for name, parameter in tiny_policy.named_parameters():
        step = 0.1 if name.startswith("base_model") else 0.01
        torch.testing.assert_close(parameter.detach(), before[name] + step, rtol=0, atol=1e-5)


def test_weight_decay_shrinks_by_rate_times_decay_and_not_through_the_gradient(
    tiny_policy, copy_parameters
):
    """With gradient 0 all that is left of AdamW's step is p * (1 - 0.1 * 0.5) = 0.95 p."""
    before = copy_parameters(tiny_policy)
    optimizer = get_optimizer(tiny_policy, base_lr=0.1, head_lr=0.1, weight_decay=0.5)
    (0.0 * sum(p.sum() for p in tiny_policy.parameters())).backward()
    optimizer.step()
    for name, parameter in tiny_policy.named_parameters():
        torch.testing.assert_close(parameter.detach(), 0.95 * before[name])


def test_the_scale_rises_to_one_and_falls_to_the_final_scale():
    """Warm-up of 3: 1/4, 2/4, 3/4, then 1; then 1 - 0.9 i / 4 over the 4 phases that are left."""
    scales = [lr_scale(phase, 3, 8, 0.1) for phase in range(8)]
    assert scales == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.775, 0.55, 0.325, 0.1])


def test_the_first_phase_learns_something():
    """The seed notebook's factor at phase 0 was 0 / warmup_steps = 0."""
    assert lr_scale(0, 20, 200, 0.1) == pytest.approx(1 / 21)
    assert lr_scale(0, 0, 5, 0.1) == 1.0


def test_the_scale_stays_at_the_final_scale_after_the_last_phase():
    """The seed notebook's factor was -0.05 at phase 230 of 200."""
    assert lr_scale(230, 20, 200, 0.1) == pytest.approx(0.1)
    assert lr_scale(10**6, 20, 200, 0.0) == 0.0


def test_a_warm_up_of_all_phases_but_the_last_does_not_divide_by_zero():
    assert [lr_scale(phase, 4, 5, 0.1) for phase in range(5)] == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 1.0]
    )
    assert lr_scale(0, 0, 1, 0.1) == 1.0
    assert math.isfinite(lr_scale(7, 4, 5, 0.1))


@given(
    total=st.integers(1, 60),
    warmup_share=st.floats(0, 1, exclude_max=True),
    final_scale=st.floats(0, 1),
)
def test_every_schedule_rises_then_falls_within_zero_and_one(total, warmup_share, final_scale):
    warmup = int(total * warmup_share)
    scales = [lr_scale(phase, warmup, total, final_scale) for phase in range(total + 10)]
    rise, fall = scales[: warmup + 1], scales[warmup:]
    assert scales[0] > 0
    assert scales[warmup] == 1.0
    assert all(0 <= scale <= 1 for scale in scales)
    assert all(a < b for a, b in zip(rise, rise[1:], strict=False))
    assert all(a >= b for a, b in zip(fall, fall[1:], strict=False))
    if total - 1 > warmup:
        assert scales[total - 1] == pytest.approx(final_scale)


def test_the_scheduler_multiplies_both_rates(tiny_policy, reel_args):
    """Warm-up 1 of 3 phases, final scale 0.5: factors 1/2, 1, 1/2."""
    args = reel_args(
        total_phases=3, warmup_steps=1, final_scale=0.5, base_lr=0.2, head_lr=0.4, weight_decay=0.0
    )
    optimizer, scheduler = get_optimizer_and_scheduler(args, tiny_policy)
    seen = []
    for _ in range(3):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    assert seen == [pytest.approx(pair) for pair in ([0.1, 0.2], [0.2, 0.4], [0.1, 0.2])]
    assert optimizer.param_groups[0]["weight_decay"] == 0.0


@pytest.mark.slow
def test_a_run_steps_the_schedule_once_per_phase_and_logs_the_rates_it_used(make_trainer):
    """Warm-up 1 of 3 phases, final scale 0.1: factors 1/2, 1, 0.1, each for all 4 steps."""
    trainer = make_trainer(total_phases=3, base_lr=0.002, head_lr=0.02)
    used = []

    @trainer.on("after_step")
    def note(ctx):
        used.append([group["lr"] for group in trainer.optimizer.param_groups])

    reports = trainer.train()
    expected = [[0.001, 0.01], [0.002, 0.02], [0.0002, 0.002]]
    assert [[r.base_lr, r.head_lr] for r in reports] == [pytest.approx(e) for e in expected]
    assert used == [pytest.approx(rates) for rates in expected for _ in range(4)]
