"""The gradient of the first step on several processes, beside that of one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.test_equality import SLOW, furthest

pytestmark = pytest.mark.process

RUNS = """
def run(name, settings, parallel):
    args = RLHFArgs(**({{"preset": "reel", "device": {device!r}, "batch_size": 16,
        "num_minibatches": 1, "gen_len": 26,
        "total_phases": 1, "batches_per_learning_phase": 1, "base_lr": 3e-3, "stop_tokens": ".",
        "warmup_steps": 0, "parallel": parallel}} | settings))
    trainer = RLHFTrainer(args, out=place / name)
    @trainer.on("after_backward")
    def keep(ctx):
        weights = ctx.policy.named_parameters()
        found = {{n: p.grad.clone() for n, p in weights if p.grad is not None}}
        torch.save(found, place / f"{{name}}.pt")
    report = trainer.run_phase().to_dict()
    weights = [p.double().sum().item() for p in trainer.policy.parameters()]
    return dict(report=report, weights=weights)
told = {{}}
for parallel in {kinds!r}:
    for name, settings in json.loads({settings!r}).items():
        told[parallel + "-" + name] = run(parallel + "-" + name, settings, parallel)
tell(**told)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "parts": {"micro_batch_size": 2},
    "recomputed": {"activation_checkpointing": True},
    "lora": {"lora_rank": 2},
    "critic": {"value_head": "separate"},
}


GPUS = torch.cuda.device_count()


def needs_gpus(n: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(n > GPUS, reason=f"needs {n} CUDA devices, of which there are {GPUS}")


@pytest.mark.parametrize(
    ("n", "kinds", "device"),
    [
        (1, ["fsdp"], "cpu"),
        (2, ["ddp", "fsdp"], "cpu"),
        pytest.param(4, ["ddp", "fsdp"], "cpu", marks=SLOW),
        pytest.param(1, ["fsdp"], "cuda", marks=needs_gpus(1)),
        pytest.param(2, ["ddp", "fsdp"], "cuda", marks=needs_gpus(2)),
    ],
)
def test_the_gradient_is_that_of_one_process(ranks, tmp_path, n, kinds, device):
    """Within 1e-6 of its length; one process that shards its weights has a group of its own."""
    (alone,) = ranks(1, runs_of(["auto"], device))
    several = ranks(n, runs_of(kinds, device), "several", is_launched=True)
    for ended in (alone, *several):
        assert ended.status == 0, ended.error
    for name, found in several[0].told.items():
        of_one = "auto-" + name.split("-")[1]
        gap = apart(tmp_path / f"of-1/{of_one}.pt", tmp_path / f"several/{name}.pt")
        assert gap < 1e-6, (name, gap)
        gap, where = furthest(alone.told[of_one]["report"], found["report"])
        assert gap < 1e-5, (name, gap, where)
        assert all(ended.told[name]["weights"] == found["weights"] for ended in several), name


def runs_of(kinds: list[str], device: str) -> str:
    return RUNS.format(kinds=kinds, device=device, settings=json.dumps(SETTINGS))


def apart(alone: Path, several: Path) -> float:
    """The length of the difference of two gradients, as a share of that of the first."""
    one, other = torch.load(alone), torch.load(several)
    assert one.keys() == other.keys() and len(one) > 5
    gap = sum((other[name] - g).double().square().sum() for name, g in one.items())
    return (gap / sum(g.double().square().sum() for g in one.values())).sqrt().item()
