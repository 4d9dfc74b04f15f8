"""Weights in bfloat16: stochastic rounding, the copy in float32, and runs of both kinds."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.models import TransformerWithValueHead, export_policy, load_model
from rlhf_lab.models.build import in_weight_precision
from rlhf_lab.probes import Budget, Run, attach, default_suite
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.checkpoint import flatten_state, unflatten_state
from rlhf_lab.training.half_weights import HalfAdamW, for_half_weights, round_stochastically
from rlhf_lab.training.restore import load_policy

KINDS = ("bf16", "bf16_stochastic")
BF16_MAX = torch.finfo(torch.bfloat16).max


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rounded(value: float, n: int = 40_000) -> torch.Tensor:
    return round_stochastically(torch.full((n,), value), seeded()).float()


def test_stochastic_rounding_by_hand():
    """Above 1, bfloat16 numbers are 2^-7 apart; 1 + 2^-9 is a quarter of the way to the next.

    So one in 4 of 40,000 goes up, with a deviation of sqrt(40,000 * 3 / 16) = 87.
    """
    found = rounded(1 + 2**-9)
    assert set(found.tolist()) == {1.0, 1 + 2**-7}
    assert abs((found > 1).sum().item() - 10_000) < 5 * 87
    found = rounded(-(1 + 3 * 2**-9))
    assert set(found.tolist()) == {-1.0, -(1 + 2**-7)}
    assert abs((found < -1).sum().item() - 30_000) < 5 * 87


@given(st.floats(width=32, allow_nan=False))
@settings(max_examples=200, deadline=None)
def test_a_number_goes_to_one_of_the_two_next_to_it(value):
    x = torch.full((64,), value)
    found = round_stochastically(x, seeded())
    truncated = (x.view(torch.int32) & -65536).view(torch.float32)
    beyond = ((x.view(torch.int32) & -65536) + 65536).view(torch.float32)
    if not x[0].isfinite() or x[0] == truncated[0]:
        assert torch.equal(found.float(), x), "what a bfloat16 represents stays as it is"
        return
    beyond = beyond.clamp(-BF16_MAX, BF16_MAX)
    assert ((found.float() == truncated) | (found.float() == beyond)).all()


def test_the_awkward_numbers():
    assert rounded(float("nan"), 10).isnan().all()
    assert (rounded(torch.finfo(torch.float32).max, 1000) == BF16_MAX).all(), "never to infinity"
    subnormal = rounded(2.0**-133 * 1.5)
    assert set(subnormal.tolist()) == {2.0**-133, 2.0**-132}
    empty = round_stochastically(torch.empty(0, 3), seeded())
    assert empty.shape == (0, 3) and empty.dtype == torch.bfloat16
    again = round_stochastically(torch.full((9,), 1.001), seeded())
    assert torch.equal(again, round_stochastically(torch.full((9,), 1.001), seeded()))


@given(st.floats(-1e4, 1e4, width=32))
@settings(max_examples=30, deadline=None)
def test_the_mean_of_many_is_the_number_itself(value):
    """Within 6 deviations of a mean of 20,000, none above half the distance of the neighbours."""
    found = rounded(value, 20_000).double()
    spacing = 2.0**-7 * max(abs(value), 2.0**-126)
    assert found.mean().item() == pytest.approx(value, abs=6 * spacing / 2 / 20_000**0.5)


class Toy(nn.Module):
    """Weights of two formats, as a policy in bfloat16 has them."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.full((4, 1000), value, dtype=torch.bfloat16))
        self.whole = nn.Parameter(torch.full((3,), value))


def adamw(policy: nn.Module, lr: float) -> AdamW:
    groups = [{"params": [weight]} for weight in policy.parameters()]
    return AdamW(groups, lr=lr, maximize=True, weight_decay=0.01, fused=True)


def climb(policy: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Steps with gradients of their own, of about 1, the same in every format."""
    for step in range(steps):
        for weight in policy.parameters():
            gradient = 1 + 0.5 * torch.randn(weight.shape, generator=seeded(step))
            weight.grad = gradient.bfloat16().to(weight.dtype)
        optimizer.step()


def test_the_copy_goes_the_way_of_weights_in_float32():
    """To rounding; and the weights are the copy, rounded to the nearest."""
    halved, whole = Toy(), Toy().float()
    ours = for_half_weights(adamw(halved, 1e-4), halved, True, 1)
    theirs = adamw(whole, 1e-4)
    climb(halved, ours, 20)
    climb(whole, theirs, 20)
    kept = ours.state[halved.low]["copy"]
    torch.testing.assert_close(kept, whole.low.data, atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(halved.whole, whole.whole, atol=1e-7, rtol=1e-6)
    assert torch.equal(halved.low.data, kept.bfloat16())
    assert "copy" not in ours.state[halved.whole]


def test_steps_below_the_resolution_add_up_only_where_they_are_kept_or_rounded_at_random():
    """100 steps of 1e-5 from 1, where a bfloat16 is 2^-7 = 0.0078 from the next.

    Plain AdamW leaves every weight at 1. Rounded at random, their mean moves as in float32: the
    deviation of one of 4,000 weights after 100 steps of probability 1.3e-3 is at most 2.8e-3.
    """
    exact = Toy().float()
    climb(exact, adamw(exact, 1e-5), 100)
    moved = exact.low.mean().item() - 1
    assert 5e-4 < moved < 1.1e-3
    plain = Toy()
    climb(plain, adamw(plain, 1e-5), 100)
    assert (plain.low == 1).all()
    for has_copy in (True, False):
        policy = Toy()
        optimizer = for_half_weights(adamw(policy, 1e-5), policy, has_copy, 1)
        climb(policy, optimizer, 100)
        held = optimizer.state[policy.low].get("copy", policy.low).float()
        bound = 1e-6 if has_copy else 6 * 2.8e-3 / 4000**0.5
        assert held.mean().item() - 1 == pytest.approx(moved, abs=bound)


def test_a_second_moment_in_bfloat16_falls_when_gradients_do():
    """By 0.999 a step: to 0.905 of itself in 100; rounded to the nearest it would stay."""
    policy = Toy()
    optimizer = for_half_weights(adamw(policy, 1e-5), policy, False, 1)
    climb(policy, optimizer, 1)
    first = optimizer.state[policy.low]["exp_avg_sq"]
    assert first.dtype == torch.bfloat16
    before = first.float().mean().item()
    for _ in range(100):
        policy.low.grad = torch.zeros_like(policy.low)
        optimizer.step()
    assert first.float().mean().item() / before == pytest.approx(0.999**100, rel=0.01)


@pytest.mark.parametrize("has_copy", [True, False])
def test_a_saved_optimizer_goes_on_to_the_bit(has_copy):
    whole = Toy()
    climb(whole, for_half_weights(adamw(whole, 1e-3), whole, has_copy, 1), 6)
    policy = Toy()
    optimizer = for_half_weights(adamw(policy, 1e-3), policy, has_copy, 1)
    climb(policy, optimizer, 3)
    saved, restored = {}, {}
    tree = flatten_state(copy.deepcopy(optimizer.state_dict()), "optimizer", saved)
    resumed = copy.deepcopy(policy)
    again = for_half_weights(adamw(resumed, 1e-3), resumed, has_copy, 1)
    again.load_state_dict(unflatten_state(tree, saved))
    flatten_state(again.state_dict(), "optimizer", restored)
    for name, kept in restored.items():
        assert kept.dtype == saved[name].dtype and torch.equal(kept, saved[name]), name
    for step in range(3, 6):
        for weight in resumed.parameters():
            gradient = 1 + 0.5 * torch.randn(weight.shape, generator=seeded(step))
            weight.grad = gradient.bfloat16().to(weight.dtype)
        again.step()
    assert torch.equal(resumed.low, whole.low) and torch.equal(resumed.whole, whole.whole)


def test_two_weights_of_one_shape_are_rounded_by_numbers_of_their_own():
    policy = nn.ParameterList([torch.ones(500, dtype=torch.bfloat16) for _ in range(2)])
    optimizer = for_half_weights(adamw(policy, 1e-3), policy, False, 1)
    for weight in policy:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert not torch.equal(policy[0], policy[1])
    assert policy[0].float().mean().item() == pytest.approx(1.001, abs=1e-3)


def test_weights_and_state_take_the_documented_bytes():
    """Per weight: 2, and of state 4 + 8 with a copy, 4 without; 4 + 8 in float32."""
    found = {}
    for kind in ("fp32", *KINDS):
        policy = in_weight_precision(TransformerWithValueHead(load_model("reel-nano")), kind)
        model = sum(w.numel() for w in policy.base_model.parameters())
        weights = sum(w.numel() * w.element_size() for w in policy.base_model.parameters())
        optimizer = adamw(policy, 1e-3)
        if kind != "fp32":
            optimizer = for_half_weights(optimizer, policy, kind == "bf16", 1)
        for weight in policy.parameters():
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        state = [optimizer.state[w] for w in policy.base_model.parameters()]
        kept = sum(x.numel() * x.element_size() for s in state for n, x in s.items() if n != "step")
        found[kind] = (weights / model, kept / model)
    assert found == {"fp32": (4, 8), "bf16": (2, 12), "bf16_stochastic": (2, 4)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "fields",
    [
        {"value_head": "separate", "micro_batch_size": 2},
        {"optimizer_in_backward": True, "max_grad_norm": None, "activation_checkpointing": True},
    ],
    ids=["critic, micro-batches", "in backward, recomputed"],
)
def test_a_run_is_resumed_to_the_bit(
    make_trainer, parameters_of, metrics_of, broken_off_and_resumed, kind, fields
):
    fields = fields | {"weight_precision": kind, "total_phases": 3, "warmup_steps": 0}
    whole, halved = make_trainer(**fields), make_trainer(**fields)
    before = parameters_of(whole.policy)
    whole.train()
    resumed = broken_off_and_resumed(halved)
    theirs, ours = parameters_of(whole.policy), parameters_of(resumed.policy)
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert not torch.equal(theirs["base_model.unembed.W_U"], before["base_model.unembed.W_U"])
    lines = metrics_of(whole.run.path)
    assert lines == metrics_of(resumed.run.path)
    assert [x["ratio_first_minibatch"] for x in lines] == pytest.approx([1, 1, 1], abs=0.1)
    dtypes = {name: weight.dtype for name, weight in theirs.items()}
    assert dtypes.pop("value_head.0.weight") == torch.float32
    assert {d for n, d in dtypes.items() if "value_head" not in n} == {torch.bfloat16}
    assert {weight.dtype for weight in resumed.reference.parameters()} == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_trained_is_saved_loaded_and_exported_as_it_is(make_trainer, tmp_path, kind):
    trainer = make_trainer(weight_precision=kind, warmup_steps=0)
    trainer.train()
    policy, _ = load_policy(trainer.run.path)
    theirs = dict(trainer.policy.named_parameters())
    for name, weight in policy.named_parameters():
        assert torch.equal(weight, theirs[name]) and weight.dtype == theirs[name].dtype
    export_policy(policy, "reel-nano", tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} <= {torch.bfloat16, torch.float32}
    tokens = torch.arange(2, 12)[None]
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    exact = copy.deepcopy(policy.base_model).to(torch.float32, print_details=False)
    with torch.no_grad():
        gap = (exact(tokens) - reloaded(tokens).logits).abs().max()
    assert gap < 1e-4


@pytest.mark.slow
def test_a_critic_from_a_reward_model_is_in_the_format_too(make_trainer, tmp_path):
    from rlhf_lab.rewards import RewardModel

    RewardModel(load_model("reel-nano"), seed=3).save(tmp_path / "reward", "reel-nano", {})
    fields = {"value_head": "separate", "critic_path": str(tmp_path / "reward")}
    trainer = make_trainer(weight_precision="bf16", warmup_steps=0, **fields)
    trainer.train()
    found = {name: weight.dtype for name, weight in trainer.policy.named_parameters()}
    heads = {found.pop(name) for name in ("value_head.weight", "value_head.bias")}
    assert heads == {torch.float32} and set(found.values()) == {torch.bfloat16}


def test_state_of_another_kind_is_refused(make_trainer):
    """Moments that were rounded cannot go on as exact ones; nothing is loaded."""
    trainer = make_trainer(weight_precision="bf16_stochastic")
    trainer.train()
    info = trainer.run.read_info()
    info["args"]["weight_precision"] = "bf16"
    trainer.run.write_info(info)
    with pytest.raises(RunError, match="weight_precision"):
        RLHFTrainer.resume(trainer.run.path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lora_rank": 2}, "lora_rank=2"),
        ({"optimizer": "adamw_8bit"}, "optimizer='adamw_8bit'"),
        ({"precision": "bf16"}, "precision='bf16'"),
    ],
)
def test_what_does_not_go_with_it_is_refused(reel_args, fields, words):
    with pytest.raises(ConfigError) as caught:
        reel_args(weight_precision="bf16", **fields)
    assert words in str(caught.value) and "weight_precision='bf16'" in str(caught.value)


def test_own_parts_of_another_kind_are_refused(make_trainer):
    policy = TransformerWithValueHead(load_model("reel-nano"))
    with pytest.raises(ConfigError, match="weights in bfloat16, and the policy's are in torch.flo"):
        make_trainer({"policy": policy}, weight_precision="bf16")
    halved = in_weight_precision(policy, "bf16")
    assert isinstance(
        make_trainer({"policy": halved}, weight_precision="bf16").optimizer, HalfAdamW
    )
    optimizer = AdamW(halved.parameters(), lr=1e-3)
    with pytest.raises(ConfigError, match="require the optimizer of the settings"):
        make_trainer({"policy": halved, "optimizer": optimizer}, weight_precision="bf16")


@pytest.mark.slow
def test_every_default_probe_records_and_its_checks_hold(make_trainer):
    trainer = make_trainer(
        weight_precision="bf16_stochastic", warmup_steps=0, gen_len=26, batch_size=32
    )
    attach(trainer, default_suite(trainer, Budget(mb=1000, time_frac=1000)))
    trainer.train()
    run = Run(trainer.run.path)
    assert len(run.probes()) == 8 and not run.notes()
    assert run.checks() and all(check.ok for check in run.checks())
