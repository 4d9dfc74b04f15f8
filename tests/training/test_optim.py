"""The optimizer: two learning rates, their schedule, and AdamW with 8-bit moments."""

import importlib.util
import sys

import pytest
import torch
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import HookedTransformer, ModelConfig, TransformerWithValueHead
from rlhf_lab.training import RLHFTrainer, get_optimizer, lr_scale
from rlhf_lab.training.optim import with_8bit_moments
from tests.training.recorded_runs import copy_weights, is_equal, train_partly


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


def test_run_steps_the_schedule_once_per_phase(runs):
    """Warm-up 1 of 5 phases, final scale 0.1: factors 1/2, 1, 0.7, 0.4, 0.1, for 4 steps each."""
    run = runs("plain")
    rates = [[1e-3 * x, run.trainer.args.head_lr * x] for x in (0.5, 1, 0.7, 0.4, 0.1)]
    assert [[r.base_lr, r.head_lr] for r in run.reports] == [pytest.approx(e) for e in rates]
    assert [step.rates for step in run.steps] == [pytest.approx(e) for e in rates for _ in range(4)]


needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="bitsandbytes comes with the extra eightbit",
)


def state_bytes(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> int:
    """Return the bytes of the moments, without the tables of codes that parameters share."""
    shared = ("qmap1", "qmap2")
    states = [optimizer.state[parameter] for parameter in parameters]
    moments = [x for s in states for name, x in s.items() if name not in shared]
    return sum(x.nbytes for x in moments if isinstance(x, Tensor) and x.ndim)


@needs_bitsandbytes
def test_moments_of_large_tensors_take_a_byte_and_a_scale(make_trainer):
    """8 bytes per number in fp32; two codes of 1 byte, and two scales of 4 for every 256, here."""
    sizes = {}
    for name in ("adamw", "adamw_8bit"):
        trainer = make_trainer(optimizer=name)
        trainer.learning_phase(trainer.rollout_phase())
        parameters = list(trainer.policy.parameters())
        large = [p for p in parameters if p.numel() >= 4096 and p.numel() % 256 == 0]
        sizes[name] = state_bytes(trainer.optimizer, large)
        numbers = sum(p.numel() for p in large)
    assert sizes["adamw"] == 8 * numbers
    assert sizes["adamw_8bit"] == 2 * numbers + 8 * numbers // 256


@needs_bitsandbytes
def test_first_step_ascends_by_the_rate_and_keeps_the_gradient(make_trainer):
    """Adam's first step is lr * g / |g|, for any number of bits; g = 2 (30 - p) > 0."""
    policy = make_trainer().policy
    before = [p.detach().clone() for p in policy.parameters()]
    rates = [1.0 if n.startswith("base_model") else 0.25 for n, _ in policy.named_parameters()]
    optimizer = with_8bit_moments(get_optimizer(policy, 1.0, 0.25, weight_decay=0.0))
    (-sum((p - 30).square().sum() for p in policy.parameters())).backward()
    optimizer.step()
    for old, parameter, rate in zip(before, policy.parameters(), rates, strict=True):
        torch.testing.assert_close(parameter.detach(), old + rate, rtol=0, atol=0.02)
        assert torch.equal(parameter.grad, 2 * (30 - old))


@needs_bitsandbytes
@pytest.mark.parametrize("fields", [{}, {"value_head": "separate", "lora_rank": 2}])
def test_resumed_run_equals_uninterrupted_run(make_trainer, fields):
    """With a critic and adapters, both of which learn."""
    fields |= {"optimizer": "adamw_8bit", "total_phases": 3, "base_lr": 1e-3, "gen_len": 12}
    whole, halved = (make_trainer(**fields) for _ in range(2))
    before = copy_weights(whole.policy)
    whole.train()
    resumed = RLHFTrainer.resume(train_partly(halved))
    codes = {s["state1"].dtype for s in resumed.optimizer.state.values()}
    assert codes <= {torch.uint8, torch.float32} and (fields.get("lora_rank") or len(codes) == 2)
    resumed.train()
    after = copy_weights(whole.policy)
    assert is_equal(copy_weights(resumed.policy), after)
    moved = [name for name in after if not torch.equal(after[name], before[name])]
    for part in ("critic", ".B") if "lora_rank" in fields else ("base_model",):
        assert any(part in name for name in moved)


def test_missing_bitsandbytes_raises_at_construction(monkeypatch, make_trainer):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r'-e "\.\[eightbit\]".*set optimizer='):
        make_trainer(optimizer="adamw_8bit")
