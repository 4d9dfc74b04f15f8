"""AdamW with 8-bit moments: its steps, the memory they take, and runs that resume."""

import importlib.util
import sys

import pytest
import torch
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.training import RLHFTrainer, checkpoint, get_optimizer
from rlhf_lab.training.optim import with_8bit_moments
from tests.training.recorded_runs import copy_weights, is_equal, train_partly

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


def test_state_that_parameters_share_is_saved_for_each(tmp_path):
    """A table of codes that two parameters share: safetensors stores no shared memory."""
    table, tensors, path = torch.arange(4.0), {}, tmp_path / "x.safetensors"
    state = {number: {"table": table, "step": number + 3} for number in (0, 1)}
    tree = checkpoint.flatten_state(state, "optimizer", tensors)
    checkpoint.save_checkpoint(path, checkpoint.copied_to_host(tensors), {})
    found = checkpoint.unflatten_state(tree, checkpoint.load_checkpoint(path)[0])
    assert [each["step"] for each in found.values()] == [3, 4]
    assert all(torch.equal(each["table"], table) for each in found.values())
