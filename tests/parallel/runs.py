"""Runs that the tests start in one process and in several, and the values that they report."""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rlhf_lab.config import RLHFArgs
from rlhf_lab.training import RLHFTrainer

BASE = {"preset": "reel", "batch_size": 16, "num_minibatches": 2, "gen_len": 26}
BASE |= {"total_phases": 2, "base_lr": 3e-3, "warmup_steps": 1}
GROUPS = {"samples_per_prompt": 4, "top_k": 8, "dynamic_sampling": 2, "gen_len": 20}
SCALED = {"kl_controller": "adaptive", "kl_target": 0.5, "reward_scaling": "scale"}
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"stop_tokens": "."},
    "parts": {"micro_batch_size": 2, "stop_tokens": "."},
    "recomputed": {"activation_checkpointing": True},
    "recomputed_parts": {"activation_checkpointing": True, "micro_batch_size": 4},
    "lora": {"lora_rank": 2, "stop_tokens": ".", "loss_aggregation": "sequence_mean"},
    "critic": {"value_head": "separate", "kl_in": "reward", "kl_estimator": "k1"},
    "grpo": {"advantages": "grpo", "stop_tokens": "."} | GROUPS,
    "adaptive": {"normalize_reward": False} | SCALED,
    "target_kl": {"target_kl": 0.0005, "batches_per_learning_phase": 4},
    "remax": {"advantages": "remax", "policy_loss": "gspo", "normalize_reward": False},
    "reset": {"reset_reference_every": 1, "lora_rank": 2},
    "stopped": {"total_phases": 3},
    "custom": {},
}
NIGHTLY = ("lora", "reset", "parts", "recomputed", "adaptive", "target_kl", "remax")
if not os.environ.get("RLHF_LAB_NIGHTLY"):
    SETTINGS = {name: SETTINGS[name] for name in SETTINGS if name not in NIGHTLY}
WATCHED = [x for x in SETTINGS if x in ("ppo", "parts", "recomputed", "lora", "critic")]
"""Settings with callbacks within a step."""
POINTS = "hook_resid_pre hook_resid_mid hook_mlp_out attn.hook_q attn.hook_z".split()


def run_all(folder: Path, parallel: str, device: str) -> dict[str, Any]:
    """Run each of the settings in this process, one after the other."""
    values = {name: run(folder / name, name, parallel, device) for name in SETTINGS}
    values["engine"] = run_with_engine(parallel, device)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return values


def run(out: Path, name: str, parallel: str, device: str) -> dict[str, Any]:
    """Run all phases of one setting; return reports, weights and the sizes of shards."""
    args = RLHFArgs(**BASE | SETTINGS[name], parallel=parallel, device=device)
    parts: dict[str, Any] = {}
    values: dict[str, Any] = {"read": []}
    if name == "grpo":  # prompts of unequal length
        parts["prompts"] = ["this movie" + end for end in ("", " wow , the", " wow ,", " wow")]
    if name == "custom":
        parts["advantages"] = lambda values, rewards, mask, **others: (
            ((rewards - rewards.mean()) / rewards.std())[:, None] * mask
        )
        parts["reward_fn"] = lambda texts: (
            values["read"].append(len(texts)) or torch.tensor([len(set(x.split())) for x in texts])
        )
    trainer = RLHFTrainer(args, out=out, **parts)
    if name in WATCHED:
        values |= watch(trainer, out, has_hooks=name == "ppo")
    if name == "adaptive":  # as a checkpoint that is loaded changes weights
        with torch.no_grad():
            trainer.policy.value_head[0].weight.mul_(1.5)
    if name == "stopped" and parallel == "fsdp":  # the callback raises an error and is removed
        trainer.on("after_score")(lambda ctx: trainer.learning_phase(ctx.rollout))
    if name in ("ppo", "stopped"):
        values["reports"] = []
        for report in trainer:
            values["reports"].append(report.to_dict())
            is_last = trainer.world is None or trainer.world.rank == trainer.world.size - 1
            trainer.stop_requested |= name == "stopped" and is_last
    else:  # without the evaluation at the end
        values["reports"] = [trainer.run_phase().to_dict() for _ in range(args.total_phases)]
    trainer.recorder.writer.wait()
    state = trainer.policy.state_dict().items()
    values["weights"] = sum(x.double().sum().item() for name, x in state if name[-3:] != "b_K")
    values["whole"] = sum(p.numel() for p in trainer.policy.parameters() if p.requires_grad)
    if parallel == "fsdp":
        moments = [x for state in trainer.optimizer.state.values() for x in state.values()]
        values["moments"] = sum(x.to_local().numel() for x in moments if x.ndim)
        values["held"] = sum(p.to_local().numel() for p in trainer.world.shards.values())
    return values


def watch(trainer: RLHFTrainer, out: Path, has_hooks: bool) -> dict[str, Any]:
    """Collect weights and gradients within steps, and activations.

    Without b_K, whose gradient is only rounding, and of which Adam makes whole steps.
    """
    path, steps, activations = out.with_suffix(".safetensors"), [], {}

    @trainer.on("after_backward")
    @trainer.on("after_step")
    def add(ctx: Any) -> None:
        named = {n: p for n, p in ctx.policy.named_parameters() if n[-3:] != "b_K"}
        grads = {name: p.grad for name, p in named.items() if p.grad is not None}
        if not path.exists():  # in the first step
            save_file(grads, path)
        steps.extend(x.detach().abs().sum().item() for x in (*named.values(), *grads.values()))

    for name in [f"blocks.{block}.{point}" for block in (0, 1) for point in POINTS * has_hooks]:

        def store(x: Any, hook: Any, name: str = name) -> None:
            if torch.is_grad_enabled():
                activations.setdefault(name, x.detach().flatten(1).abs().sum(1).tolist())

        trainer.policy.base_model.add_hook(name, store)
    return {"steps": steps, "activations": activations}


def run_with_engine(parallel: str, device: str) -> dict[str, Any]:
    """Run two phases with a rollout engine in each process."""
    from tests.training.test_rollout_engine import Double, expected_logprobs, trainer_with

    engine, gaps = Double(), []
    trainer = trainer_with(engine, device=device, parallel=parallel, total_phases=2)

    @trainer.on("after_score")
    def compare(ctx: Any) -> None:
        samples = ctx.rollout.samples
        expected = expected_logprobs(engine, samples, 1.0)
        gaps.append((expected - samples.logprobs).abs().max().item())

    trainer.run_phase(), trainer.run_phase()
    return {"loads": engine.loads, "seeds": engine.seeds, "gaps": gaps}
