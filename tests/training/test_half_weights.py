"""Optimizers: rates and their schedule, 8-bit moments, and weights in bfloat16."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead, export_policy, load_model
from rlhf_lab.models.build import in_weight_precision
from rlhf_lab.training import get_optimizer, lr_scale, optim
from rlhf_lab.training.optim import HalfAdamW, round_stochastically
from tests.training.recorded_runs import copy_weights, needs_bitsandbytes

BF16_MAX = torch.finfo(torch.bfloat16).max


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def round_many(value: float, n: int = 40_000) -> torch.Tensor:
    return round_stochastically(torch.full((n,), value), seeded()).float()


def test_stochastic_rounding_matches_hand_computed():
    """Above 1, bfloat16 numbers are 2^-7 apart; 1 + 2^-9 is a quarter of the way to the next.

    So one in 4 of 40,000 goes up, with a deviation of sqrt(40,000 * 3 / 16) = 87.
    """
    found = round_many(1 + 2**-9)
    assert set(found.tolist()) == {1.0, 1 + 2**-7}
    assert abs((found > 1).sum().item() - 10_000) < 5 * 87
    assert set(round_many(-(1 + 2**-9)).tolist()) == {-1.0, -(1 + 2**-7)}
    assert round_many(float("nan"), 10).isnan().all()
    assert set(round_many(-float("inf"), 10).tolist()) == {-float("inf")}
    assert set(round_many(1.5).tolist()) == {1.5}  # bfloat16 numbers do not change
    assert (round_many(torch.finfo(torch.float32).max) == BF16_MAX).all()
    assert set(round_many(2.0**-133 * 1.5).tolist()) == {2.0**-133, 2.0**-132}


class Toy(nn.Module):
    """Weights of two formats, as a policy in bfloat16 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.low_too = (
            nn.Parameter(torch.ones(4, 1000, dtype=torch.bfloat16)) for _ in range(2)
        )
        self.whole = nn.Parameter(torch.ones(3))


def adamw(policy: nn.Module, lr: float) -> AdamW:
    groups = [{"params": [weight]} for weight in policy.parameters()]
    return AdamW(groups, lr=lr, maximize=True, weight_decay=0.01, fused=True)


def climb(policy: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Step with gradients of about 1, which are the same in every format."""
    for step in steps:
        for weight in policy.parameters():
            gradient = 1 + 0.5 * torch.randn(weight.shape, generator=seeded(step))
            weight.grad = gradient.bfloat16().to(weight.dtype)
        optimizer.step()


@pytest.mark.slow
def test_steps_below_the_resolution_add_up():
    """100 steps of 1e-5 from 1, where a bfloat16 is 2^-7 = 0.0078 from the next.

    Plain AdamW leaves every weight at 1. Rounded stochastically, their mean moves as in float32:
    the deviation of one of 4,000 weights after 100 steps of probability 1.3e-3 is at most 2.8e-3.
    """
    exact, plain, copied, rounded = Toy().float(), Toy(), Toy(), Toy()
    optimizers = [adamw(exact, 1e-5), adamw(plain, 1e-5)]
    for policy, has_copy in ((copied, True), (rounded, False)):
        optimizers.append(HalfAdamW(adamw(policy, 1e-5).param_groups, policy, has_copy, 1))
    for policy, optimizer in zip((exact, plain, copied, rounded), optimizers, strict=True):
        climb(policy, optimizer, range(100))
    moved = exact.low.mean().item() - 1
    assert 5e-4 < moved < 1.1e-3 and (plain.low == 1).all()
    kept = optimizers[2].state[copied.low]["copy"]
    torch.testing.assert_close(kept, exact.low.data, atol=1e-6, rtol=0)
    torch.testing.assert_close(copied.whole, exact.whole, atol=1e-6, rtol=0)
    assert torch.equal(copied.low.data, kept.bfloat16())
    assert "copy" not in optimizers[2].state[copied.whole]
    bound = 6 * 2.8e-3 / 4000**0.5
    assert rounded.low.float().mean().item() - 1 == pytest.approx(moved, abs=bound)
    assert not torch.equal(rounded.low[0], rounded.low[1])
    assert not torch.equal(rounded.low, rounded.low_too)


@pytest.mark.slow
def test_second_moment_falls_with_the_gradients():
    """By 0.999 a step, to 0.905 in 100; rounded to the nearest it would stay."""
    policy = Toy()
    optimizer = HalfAdamW(adamw(policy, 1e-5).param_groups, policy, False, 1)
    climb(policy, optimizer, range(1))
    moment = optimizer.state[policy.low]["exp_avg_sq"]
    assert moment.dtype == torch.bfloat16
    before = moment.float().mean().item()
    for _ in range(100):
        policy.low.grad = torch.zeros_like(policy.low)
        optimizer.step()
    assert moment.float().mean().item() / before == pytest.approx(0.999**100, rel=0.01)


@pytest.mark.slow
def test_run_in_bf16_is_exported_as_it_is(runs, tmp_path):
    """test_reference_reset.py has runs that are saved and loaded."""
    trainer = runs("bf16").trainer
    policy = trainer.policy
    dtypes = {name: weight.dtype for name, weight in policy.named_parameters()}
    heads = {dtypes.pop(name) for name in list(dtypes) if name.startswith("value_head")}
    assert heads == {torch.float32} and set(dtypes.values()) == {torch.bfloat16}
    assert {w.dtype for w in trainer.reference.parameters()} == {torch.bfloat16}
    export_policy(policy, "reel-nano", tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} <= {torch.bfloat16, torch.float32}
    tokens = torch.arange(2, 12)[None]
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    exact = copy.deepcopy(policy.base_model).to(torch.float32, print_details=False)
    with torch.no_grad():
        assert (exact(tokens) - reloaded(tokens).logits).abs().max() < 1e-4


@pytest.mark.slow
def test_custom_weights_must_be_in_bf16(make_trainer):
    policy = TransformerWithValueHead(load_model("reel-nano"))
    with pytest.raises(ConfigError, match="weights in bfloat16, and the policy's are in torch.flo"):
        make_trainer({"policy": policy}, weight_precision="bf16")
    parts = {"policy": in_weight_precision(policy, "bf16")}
    optimizer = make_trainer(parts, weight_precision="bf16", seed=5).optimizer
    assert isinstance(optimizer, HalfAdamW) and (optimizer.has_copy, optimizer.seed) == (True, 5)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [32, pytest.param(8, marks=needs_bitsandbytes)])
def test_two_groups_step_up_by_their_learning_rates(bits):
    """Adam's first step is lr * g / |g|; the objective -sum (p - 30)^2 has g = 2 (30 - p) > 0."""
    policy = TransformerWithValueHead(load_model("reel-nano"))
    before = copy_weights(policy)
    optimizer = get_optimizer(policy, base_lr=1.0, head_lr=0.25, weight_decay=0.0)
    optimizer = optim.with_8bit_moments(optimizer) if bits == 8 else optimizer
    for group, part in zip(
        optimizer.param_groups, (policy.base_model, policy.value_head), strict=True
    ):
        assert {id(p) for p in group["params"]} == {id(p) for p in part.parameters()}
    (-sum((p - 30).square().sum() for p in policy.parameters())).backward()
    optimizer.step()
    formats = {state["state1"].dtype for state in optimizer.state.values() if "state1" in state}
    assert formats == ({torch.uint8, torch.float32} if bits == 8 else set())
    for name, parameter in policy.named_parameters():
        step, error = 1.0 if name.startswith("base_model") else 0.25, 0.02 if bits == 8 else 1e-5
        torch.testing.assert_close(parameter.detach(), before[name] + step, rtol=0, atol=error)
        assert torch.equal(parameter.grad, 2 * (30 - before[name]))


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
    assert run.rates == [pytest.approx(e) for e in rates for _ in range(4)]
    run = runs("critic")  # whose weights have the rate of the transformer
    assert run.reports[-1].head_lr == run.trainer.args.head_lr != run.reports[-1].base_lr
    trunk = run.trainer.optimizer.param_groups[0]["params"]
    assert set(trunk) >= set(run.trainer.policy.critic.parameters())
