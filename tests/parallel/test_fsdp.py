"""Weights cut up by FSDP2, number by number beside the same runs in one process."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import make_reference
from rlhf_lab.parallel.validation import validate_process_settings, validate_shardable
from rlhf_lab.rewards import load_policy_and_critic
from rlhf_lab.training.checkpoint import load_checkpoint
from tests.parallel.test_command import SMALL, call
from tests.parallel.test_equality import SETTINGS, SLOW, furthest

RUNS = """
heard = {{}}
def run(name, settings, parallel, watch):
    args = RLHFArgs(**({{"preset": "reel", "device": "cpu", "batch_size": 16, "num_minibatches": 2,
        "gen_len": 26, "total_phases": 2, "base_lr": 3e-3, "warmup_steps": 1,
        "parallel": parallel}} | settings))
    parts = {{}}
    if args.samples_per_prompt > 1:  # prompts of unequal length
        ends = ["", " wow , the", " wow ,", " wow"]
        parts["prompts"] = ["this movie" + end for end in ends]
    trainer = RLHFTrainer(args, out=place / name, **parts)
    shown = watch(trainer) if watch else None
    reports = []
    while trainer.phase < args.total_phases:  # the end samples as the phases do
        reports.append(trainer.run_phase().to_dict())
    trainer.recorder.writer.wait()
    weights = sum(p.double().sum().item() for p in trainer.policy.parameters())
    found = dict(reports=reports, shown=shown, weights=weights)
    if parallel == "fsdp":
        of_state = [x for state in trainer.optimizer.state.values() for x in state.values()]
        held = trainer.world.shards.values()
        found |= dict(
            held=sum(p.to_local().numel() for p in held),
            whole=sum(p.numel() for p in trainer.policy.parameters() if p.requires_grad),
            moments=sum(x.to_local().numel() for x in of_state if x.ndim),
        )
    return found
def watching(trainer):
    # weights, gradients and hooks as listeners of one process see them, at every moment of a step;
    # but for b_K, which moves no pattern: its gradient is rounding, of which Adam makes whole steps
    seen, acts = [], {{}}
    of = lambda policy: [p for name, p in policy.named_parameters() if not name.endswith("b_K")]
    @trainer.on("before_minibatch")
    def before(ctx):
        seen.append([p.detach().abs().sum().item() for p in of(ctx.policy)])
    @trainer.on("after_backward")
    def backward(ctx):
        seen.append([p.grad.abs().sum().item() for p in of(ctx.policy)])
    @trainer.on("after_step")
    def step(ctx):
        seen.append([p.detach().abs().sum().item() for p in of(ctx.policy)])
    for block in (0, 1):
        for point in "hook_resid_pre hook_resid_mid hook_mlp_out attn.hook_q attn.hook_z".split():
            def hear(x, hook, name=f"{{block}}.{{point}}"):
                if torch.is_grad_enabled():
                    acts.setdefault(name, x.detach().flatten(1).abs().sum(1).tolist())
            trainer.policy.base_model.add_hook(f"blocks.{{block}}.{{point}}", hear)
    return dict(seen=seen, acts=acts)
def probing(trainer):
    # the default probes, one of which fails on the main process
    from contextlib import nullcontext
    from rlhf_lab.probes import attach_default_suite
    with nullcontext() if trainer.world is None else trainer.world.main_only():
        suite = attach_default_suite(trainer)
    if trainer.is_main:
        first = next(iter(suite.probes.values()))
        first.observe = lambda seen: 1 / 0
        return first.name
watch = {{"watched": watching, "probed": probing}}
told = {{name: run(name, settings, {parallel!r}, watch.get(name))
        for name, settings in json.loads({settings!r}).items()}}
{after}
tell(**told)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""
MANY: dict[str, dict[str, Any]] = {
    "watched": {"total_phases": 1, "warmup_steps": 0},
    "probed": {},
    "unprobed": {},
    "recomputed": {"activation_checkpointing": True, "micro_batch_size": 4},
    "recomputed_whole": {"activation_checkpointing": True},
    "reset": {"reset_reference_every": 1, "lora_rank": 2},
} | {name: SETTINGS[name] for name in ("parts", "grpo", "lora", "critic", "target_kl")}
ONE: dict[str, Any] = {"stop_tokens": ".", "total_phases": 1, "warmup_steps": 0}
MUTATIONS = """
import rlhf_lab.training.optimization as update
import rlhf_lab.parallel.sharding as sharding
from torch.distributed.fsdp import FSDPModule
factor, weigh = FSDPModule.set_gradient_divide_factor, update._weigh
faults = {
    "an average for a sum": (
        FSDPModule, "set_gradient_divide_factor", lambda self, one: factor(self, 2.0)),
    "denominators of the rank": (
        update, "_weigh", lambda t, part, whole, how: weigh(t, part, part, how)),
    "a norm of the shard": (
        update.PolicyUpdate, "clip", lambda self, limit: torch.nn.utils.get_total_norm(
            [p.grad.to_local() for p in self.trainer.policy.parameters()])),
    "changes of whole weights are dropped": (
        sharding.ShardedWorld, "_copy_to_shards", lambda self: None),
}
def changing(trainer):  # as a checkpoint that is loaded does
    with torch.no_grad():
        trainer.policy.value_head[0].weight.mul_(1.5)
for name, (place_of, attribute, wrong) in faults.items():
    right = getattr(place_of, attribute)
    setattr(place_of, attribute, wrong)
    told[name] = run(name, json.loads(ONE), "fsdp", changing)
    setattr(place_of, attribute, right)
told["right"] = run("right", json.loads(ONE), "fsdp", changing)
"""
MUTATIONS = MUTATIONS.replace("ONE", repr(json.dumps(ONE)))
RIGHT = f'told["right"] = run("right", json.loads({json.dumps(ONE)!r}), "auto", changing)'
RIGHT = MUTATIONS[MUTATIONS.index("def changing") : MUTATIONS.index("for name")] + RIGHT


def runs_of(settings: dict[str, Any], parallel: str = "fsdp", after: str = "") -> str:
    return RUNS.format(settings=json.dumps(settings), parallel=parallel, after=after)


@pytest.mark.process
def test_two_processes_with_half_the_weights_each_are_one_run(ranks, tmp_path):
    """Every number of every report, for many settings, in one start of three processes."""
    (alone,), both = (
        ranks(1, runs_of(MANY, "auto", RIGHT)),
        ranks(2, runs_of(MANY, after=MUTATIONS)),
    )
    assert [ended.status for ended in (alone, *both)] == [0] * 3, both[0].error + alone.error
    for name in (*MANY, "right"):
        held, whole = shares_of_one_run(name, alone, both)
        one, first = (ended.told[name] for ended in (alone, both[0]))
        assert sum(held) == whole, name
        assert max(held) < 0.6 * whole, name
        assert 0.9 * first["held"] < first["moments"] / 2 <= first["held"], name
    one, first, second = (ended.told["watched"]["shown"] for ended in (alone, *both))
    assert len(one["seen"]) == len(first["seen"]) == 12 and second["seen"] == []
    for expected, found in zip(one["seen"], first["seen"], strict=True):
        assert found == pytest.approx(expected, rel=2e-4, abs=2e-3)
    assert len(one["acts"]) >= 10
    for point, rows in one["acts"].items():
        assert first["acts"][point] + second["acts"][point] == pytest.approx(rows, rel=1e-5), point
    told_of_the_probe(both, tmp_path / "of-2/probed")
    one_file(tmp_path / "of-1/watched", tmp_path / "of-2/watched")
    right = alone.told["right"]["reports"]
    faults = {
        name: furthest(right, x["reports"])[0]
        for name, x in both[0].told.items()
        if name not in MANY and name != "right"
    }
    assert len(faults) == 4 and min(faults.values()) > 1e-3, faults


@SLOW
@pytest.mark.process
def test_four_processes_with_a_quarter_of_the_weights_each_are_one_run(ranks):
    many = {
        name: {"batch_size": 32} | MANY[name] for name in MANY if name not in ("watched", "probed")
    }
    (alone,), four = ranks(1, runs_of(many, "auto")), ranks(4, runs_of(many))
    assert [ended.status for ended in (alone, *four)] == [0] * 5, four[0].error + alone.error
    for name in many:
        held, whole = shares_of_one_run(name, alone, four)
        assert sum(held) == whole, name
        assert max(held) < 0.35 * whole, name


@pytest.mark.process
def test_two_machines_have_a_copy_of_the_weights_each_cut_up_within_it(ranks):
    """Four processes on two machines (HSDP): half the weights each, and the run of one process."""
    many = {name: {"batch_size": 32} | MANY[name] for name in ("unprobed", "lora", "target_kl")}
    (alone,), four = ranks(1, runs_of(many, "auto")), ranks(4, runs_of(many), nodes=2)
    assert [ended.status for ended in (alone, *four)] == [0] * 5, four[0].error + alone.error
    for name in many:
        held, whole = shares_of_one_run(name, alone, four)
        assert held[:2] == held[2:] and sum(held) == 2 * whole, name
        assert max(held) < 0.6 * whole, name


def shares_of_one_run(name: str, alone: Any, several: list[Any]) -> tuple[list[int], int]:
    """How much of the weights each process holds, and how much there is; all ran the same run."""
    one, *parts = (ended.told[name] for ended in (alone, *several))
    gap, where = furthest(one["reports"], parts[0]["reports"])
    assert gap < 2e-5, (name, gap, where)
    assert len({part["weights"] for part in parts}) == 1, name
    return [part["held"] for part in parts], parts[0]["whole"]


def told_of_the_probe(both: list[Any], run: Path) -> None:
    """The probe that failed on the main process is off, the others recorded, no weight differs."""
    failed = both[0].told["probed"]["shown"]
    assert "ZeroDivisionError" in both[0].error and both[1].told["probed"]["shown"] is None
    recorded = {path.stem for path in (run / "probes/records").glob("*.jsonl")}
    checks = [json.loads(line) for line in (run / "probes/checks.jsonl").open()]
    assert len(recorded - {failed}) == 7 and len(checks) > 15
    assert all(check["ok"] for check in checks)
    for ended in both:
        assert ended.told["probed"]["weights"] == ended.told["unprobed"]["weights"]


def one_file(alone: Path, both: Path) -> None:
    """The checkpoints of one process and of shards have the same names and numbers."""
    one, found = (load_checkpoint(run / "checkpoints/last.safetensors")[0] for run in (alone, both))
    assert one.keys() == found.keys() and len(one) > 100
    for name, tensor in one.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype), name
        if not name.endswith("b_K"):  # whose gradient is all rounding
            assert (found[name] - tensor).abs().mean() < 1e-6, name


@pytest.mark.process
def test_a_disk_that_is_full_ends_the_run_on_all_processes(ranks, tmp_path):
    full = (
        "import rlhf_lab.training.checkpoint as c\n"
        "def save(*given, **more):\n"
        "    raise OSError(28, 'No space left on device')\n"
        "if rank == 0:\n"
        "    c.save_file = save"
    )
    train = ["train", *SMALL, "--parallel", "fsdp", "--total-phases", "3"]
    first, second = ranks(2, call(*train, "--out", str(tmp_path / "run"), before=full))
    assert (first.status, second.status) == (2, 75)
    assert "No space left on device" in first.error and "Traceback" not in first.error
    assert "process 1 lost another process" in second.error


LOCAL = """
from rlhf_lab.parallel.world import World
torch.distributed.init_process_group("gloo", timeout=__import__("datetime").timedelta(seconds=6))
World.broadcast = lambda self, value: value if rank == 0 else []
"""


@pytest.mark.process
def test_a_moment_that_one_process_alone_shows_ends_in_an_error(ranks):
    """The main process puts weights together for a listener that the other is not told of."""
    both = ranks(2, runs_of({"watched": MANY["watched"]}).replace("heard = {}", LOCAL))
    assert all(ended.status for ended in both)


LEARNS = """
trainer = RLHFTrainer(RLHFArgs(preset="reel", device="cpu", batch_size=4, num_minibatches=2,
                               gen_len=6, total_phases=2, parallel="fsdp"))
@trainer.on("after_score")
def learn(ctx):
    trainer.learning_phase(ctx.rollout)
reports = trainer.train()
tell(phases=len(reports))
trainer.world.close()
"""


@pytest.mark.process
def test_a_listener_that_learns_is_refused_and_the_run_goes_on(ranks):
    first, second = ranks(2, LEARNS)
    assert first.told == second.told == {"phases": 2}, first.error
    assert "parallel='fsdp' learns with all processes, and a callback runs in one" in first.error
    assert second.error == ""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimizer": "adamw_8bit"}, "cannot be combined with optimizer='adamw_8bit'"),
        ({"weight_precision": "bf16"}, "cannot be combined with weight_precision='bf16'"),
        ({"precision": "bf16"}, "Set activation_checkpointing=True, or parallel='ddp'"),
    ],
)
def test_settings_that_fsdp_cannot_have_are_refused(settings, said):
    args = RLHFArgs(preset="reel", parallel="fsdp", **settings)
    with pytest.raises(ConfigError, match=said):
        validate_process_settings(args, 2)
    validate_process_settings(dataclasses.replace(args, parallel="ddp"), 2)


def test_parts_that_fsdp_cannot_cut_up_are_refused():
    args = RLHFArgs(preset="reel", parallel="fsdp")
    policy = load_policy_and_critic(args, torch.device("cpu"))
    reference = make_reference(policy.base_model)
    validate_shardable(policy, reference, None)
    with pytest.raises(ConfigError, match="does not shard a custom optimizer"):
        validate_shardable(policy, reference, torch.optim.SGD(policy.parameters()))
    with pytest.raises(ConfigError, match="does not shard trained weights of the reference"):
        validate_shardable(policy, policy.base_model, None)
    policy.forward = lambda *inputs: None
    with pytest.raises(ConfigError, match="the custom forward of TransformerWithValueHead"):
        validate_shardable(policy, reference, None)
