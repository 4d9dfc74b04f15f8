"""This package as a contestant: `python -m benchmarks.ours NAME`, driven by `worker.serve`."""

import sys
import tempfile
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.worker import Clock, Setup, serve
from rlhf_lab.config import RLHFArgs
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.models.cpu_tuning import tune_for
from rlhf_lab.probes import attach, default_suite
from rlhf_lab.sampling import SamplingSpec, sample, tokenize_prompts
from rlhf_lab.training import Context, Event, RLHFTrainer

STAGES: tuple[tuple[Event, str], ...] = (
    ("after_rollout", "rollout/sampling"),
    ("after_score", "rollout/scoring"),
    ("before_minibatch", "learning/minibatches"),
    ("after_loss", "learning/forward"),
    ("after_backward", "learning/backward"),
    ("after_step", "learning/optimizer"),
)


def bench_args(setup: Setup, **changes: Any) -> RLHFArgs:
    """The trainer's settings for the work that the setup describes."""
    fields = {
        "preset": "gpt2-medium",
        "base_model": setup["model"],
        "device": setup["device"],
        "seed": setup["seed"],
        "prefix": setup["prefix"],
        "batch_size": setup["batch_size"],
        "num_minibatches": setup["num_minibatches"],
        "batches_per_learning_phase": setup["passes"],
        "gen_len": setup["gen_len"],
        "top_k": setup["top_k"],
        "reward_fn": f"count:{setup['rewarded']}",
        "precision": setup["precision"],
    }
    return RLHFArgs(**(fields | changes))


def load_phase(setup: Setup, site: str | None = None) -> Callable[[Clock], None]:
    """One rollout phase and one learning phase of a trainer, and nothing else.

    Args:
        site: hook point, or pattern of several, at which a hook reads in every forward pass.
    """
    trainer = RLHFTrainer(bench_args(setup))
    tune_for(trainer.policy, trainer.args.cpu_tuning)
    if site is not None:
        is_read = lambda name: fnmatch(name, site)
        trainer.policy.base_model.add_hook(is_read, lambda activation, hook: None)
    clocks: list[Clock] = []

    def lap(stage: str) -> Callable[[Context], None]:
        return lambda ctx: clocks[-1].lap(stage)

    for event, stage in STAGES:
        trainer.on(event)(lap(stage))

    def phase(clock: Clock) -> None:
        clocks[:] = [clock]
        trainer.learning_phase(trainer.rollout_phase())
        trainer.phase += 1

    return phase


def load_run(probed: bool, setup: Setup) -> Callable[[Clock], None]:
    """A run that is logged and saved as any other, with or without the default probes.

    Each call is the next phase; the one after the last phase is the end of the run, where samples
    are drawn for a final evaluation and probes look at the final weights.
    """
    directory = tempfile.TemporaryDirectory()
    n = setup["run_phases"]
    phases = {"total_phases": n, "warmup_steps": 0, "save_every": n}
    trainer = RLHFTrainer(bench_args(setup, **phases), out=Path(directory.name, "run"))
    tune_for(trainer.policy, trainer.args.cpu_tuning)
    attachment = attach(trainer, default_suite(trainer)) if probed else None
    reports = iter(trainer)

    def phase(clock: Clock, _kept: tempfile.TemporaryDirectory = directory) -> None:
        taken = attachment.seconds if probed else {}
        before = {name: by_phase.total() for name, by_phase in taken.items()}
        next(reports, None)
        clock.stages |= {f"probes/{n}": taken[n].total() - before.get(n, 0.0) for n in taken}

    return phase


def load_sampling(setup: Setup) -> Callable[[Clock], None]:
    """The sampler alone."""
    args = bench_args(setup)
    policy = TransformerWithValueHead(load_model(setup["model"], device=setup["device"]))
    tune_for(policy, args.cpu_tuning)
    prompt = tokenize_prompts(policy.base_model.tokenizer, [args.prefix], args.prepend_bos)
    generator = torch.Generator().manual_seed(setup["seed"])
    spec = SamplingSpec.from_args(args)

    def phase(clock: Clock) -> None:
        sample(policy, prompt * args.batch_size, spec, generator)
        clock.lap("rollout/sampling")

    return phase


def load_hf_generate(setup: Setup) -> Callable[[Clock], None]:
    """Hugging Face's `generate` on the same weights: one static batch, top-k, with its cache."""
    model = AutoModelForCausalLM.from_pretrained(setup["model"]).to(setup["device"]).eval()
    prompt = torch.arange(1, setup["prefix_len"] + 1, device=setup["device"])
    prompts = prompt.repeat(setup["batch_size"], 1)
    options = {
        "do_sample": True,
        "top_k": setup["top_k"],
        "max_new_tokens": setup["gen_len"],
        "min_new_tokens": setup["gen_len"],
        "pad_token_id": 0,
        "use_cache": True,
    }

    def phase(clock: Clock) -> None:
        model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
        clock.lap("rollout/sampling")

    return phase


LOADERS: MappingProxyType[str, Callable[[Setup], Callable[[Clock], None]]] = MappingProxyType(
    {
        "ours": load_phase,
        "ours-residual": partial(load_phase, site="blocks.0.hook_resid_post"),
        "ours-pattern": partial(load_phase, site="blocks.0.attn.hook_pattern"),
        "ours-all": partial(load_phase, site="*"),
        "ours-sampling": load_sampling,
        "hf-generate": load_hf_generate,
        "ours-run": partial(load_run, False),
        "ours-run-with-probes": partial(load_run, True),
    }
)

if __name__ == "__main__":
    serve(LOADERS[sys.argv[1]], ("torch", "transformers", "transformer_lens"))
