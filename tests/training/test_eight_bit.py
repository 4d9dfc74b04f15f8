"""AdamW with 8-bit moments: its steps, the memory they take, and going on from a checkpoint."""

import importlib.util
import sys

import pytest
import torch
from torch import Tensor, nn

from rlhf_lab.errors import ConfigError
from rlhf_lab.training import RLHFTrainer, get_optimizer
from rlhf_lab.training.eight_bit import with_8bit_moments

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="bitsandbytes comes with the extra eightbit",
)
FIELDS = {"total_phases": 3, "base_lr": 1e-3, "gen_len": 12}


def state_bytes(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> int:
    """Of the moments of some parameters, tables of 256 codes that all share not counted."""
    shared = ("qmap1", "qmap2")
    states = [optimizer.state[parameter] for parameter in parameters]
    moments = [x for s in states for name, x in s.items() if name not in shared]
    return sum(x.nbytes for x in moments if isinstance(x, Tensor) and x.ndim)


@needs_bitsandbytes
def test_the_moments_of_large_tensors_take_a_byte_and_a_scale_per_block(make_trainer):
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
def test_the_first_step_goes_up_by_the_learning_rate_and_leaves_the_gradient(make_trainer):
    """Adam's first step is lr * g / |g|, whatever the bits; g = 2 (30 - p) > 0."""
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
def test_a_short_run_ends_near_the_run_with_32_bits(make_trainer, copy_parameters):
    """After 12 steps, apart by less than a quarter of the way that the weights went."""
    fields = FIELDS | {"batches_per_learning_phase": 6}
    start = copy_parameters(make_trainer(**fields).policy)
    ends = []
    for name in ("adamw", "adamw_8bit"):
        trainer = make_trainer(optimizer=name, **fields)
        trainer.learning_phase(trainer.rollout_phase())
        ends.append(copy_parameters(trainer.policy))
    flat = [torch.cat([(end[n] - start[n]).flatten() for n in start]) for end in ends]
    apart, way = (flat[0] - flat[1]).norm(), flat[0].norm()
    assert 0 < apart < 0.25 * way


@needs_bitsandbytes
def test_a_resumed_run_ends_like_the_one_that_was_not_stopped(make_trainer, copy_parameters):
    whole, halved = (make_trainer(optimizer="adamw_8bit", **FIELDS) for _ in range(2))
    whole.train()
    for report in halved:
        if report.phase == 1:
            halved.request_stop()
    resumed = RLHFTrainer.resume(halved.run.path)
    codes = [s["state1"] for s in resumed.optimizer.state.values()]
    assert {x.dtype for x in codes} == {torch.uint8, torch.float32}
    resumed.train()
    theirs, ours = copy_parameters(whole.policy), copy_parameters(resumed.policy)
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


@needs_bitsandbytes
def test_a_critic_and_adapters_learn_with_8_bits(make_trainer, copy_parameters):
    trainer = make_trainer(optimizer="adamw_8bit", value_head="separate", lora_rank=2)
    before = copy_parameters(trainer.policy)
    trainer.train()
    after = copy_parameters(trainer.policy)
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert any(n.startswith("critic") for n in moved) and any(n.endswith(".B") for n in moved)


def test_without_bitsandbytes_one_sentence_says_what_to_install(monkeypatch, make_trainer):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r'-e "\.\[eightbit\]".*set optimizer='):
        make_trainer(optimizer="adamw_8bit")


def test_the_state_that_parameters_share_is_saved_for_each(tmp_path):
    """A table of codes that two parameters share: safetensors stores no shared memory."""
    from rlhf_lab.training import checkpoint
    from rlhf_lab.training.checkpoint_writer import copied_to_host

    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters())
    table = torch.arange(4.0)
    for step, parameter in enumerate(layer.parameters()):
        optimizer.state[parameter] = {"table": table, "step": step + 3}
    tensors: dict[str, torch.Tensor] = {}
    tree = checkpoint.flatten_state(optimizer.state_dict(), "optimizer", tensors)
    checkpoint.save_checkpoint(tmp_path / "x.safetensors", copied_to_host(tensors), {})
    loaded, _ = checkpoint.load_checkpoint(tmp_path / "x.safetensors")
    fresh = torch.optim.SGD(layer.parameters())
    fresh.load_state_dict(checkpoint.unflatten_state(tree, loaded))
    states = [fresh.state[parameter] for parameter in layer.parameters()]
    assert [state["step"] for state in states] == [3, 4]
    assert all(
        type(state["step"]) is int and torch.equal(state["table"], table) for state in states
    )
