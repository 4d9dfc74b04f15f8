"""This package as a contestant: `python -m benchmarks.ours NAME`, driven by `worker.serve`."""

import sys
import tempfile
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.worker import Clock, Setup, serve
from rlhf_lab.config import RLHFArgs
from rlhf_lab.models.cpu_tuning import tune_for
from rlhf_lab.probes import attach, default_suite
from rlhf_lab.training import Context, Event, RLHFTrainer

RUN_PHASES = 20  # of the run with the default probes
STAGES: tuple[tuple[Event, str], ...] = (
    ("after_rollout", "rollout/sampling"),
    ("after_score", "rollout/scoring"),
    ("before_minibatch", "learning/minibatches"),
    ("after_loss", "learning/forward"),
    ("after_backward", "learning/backward"),
    ("after_step", "learning/optimizer"),
)


def bench_args(setup: Setup, **changes: Any) -> RLHFArgs:
    """Return the trainer's settings for the work of the setup."""
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
    """Load a trainer, with a hook at the hook points that match `site`, for one phase at a time."""
    trainer = RLHFTrainer(bench_args(setup))
    tune_for(trainer.policy, trainer.args.cpu_tuning)
    if site is not None:
        is_read = lambda name: fnmatch(name, site)
        trainer.policy.base_model.add_hook(is_read, lambda activation, hook: None)
    clocks: list[Clock] = []

    def lap(stage: str) -> Callable[[Context], None]:
        return lambda ctx: clocks[-1].lap(stage)

    for event, stage in STAGES:
        if event != "after_loss" or trainer.step_graph is None:  # on CUDA, it would stop replays
            trainer.on(event)(lap(stage))

    def phase(clock: Clock) -> None:
        clocks[:] = [clock]
        trainer.learning_phase(trainer.rollout_phase())
        trainer.phase += 1

    return phase


def load_run(probed: bool, setup: Setup) -> Callable[[Clock], None]:
    """Load a run with logs and checkpoints, with or without the default probes.

    The call after the last phase is the end of the run.
    """
    directory = tempfile.TemporaryDirectory()
    phases = {"total_phases": RUN_PHASES, "warmup_steps": 0, "save_every": RUN_PHASES}
    trainer = RLHFTrainer(bench_args(setup, **phases), out=Path(directory.name, "run"))
    tune_for(trainer.policy, trainer.args.cpu_tuning)
    attachment = attach(trainer, default_suite(trainer)) if probed else None
    reports = iter(trainer)

    def phase(clock: Clock, _kept: tempfile.TemporaryDirectory = directory) -> None:
        taken = attachment.seconds if probed else {}
        before = dict(taken)
        next(reports, None)
        clock.stages |= {f"probes/{n}": taken[n] - before.get(n, 0.0) for n in taken}

    return phase


LOADERS: MappingProxyType[str, Callable[[Setup], Callable[[Clock], None]]] = MappingProxyType(
    {
        "ours": load_phase,
        "ours-residual": partial(load_phase, site="blocks.0.hook_resid_post"),
        "ours-pattern": partial(load_phase, site="blocks.0.attn.hook_pattern"),
        "ours-all": partial(load_phase, site="*"),
        "ours-run": partial(load_run, False),
        "ours-run-with-probes": partial(load_run, True),
    }
)

if __name__ == "__main__":
    serve(LOADERS[sys.argv[1]], ("torch", "transformers", "transformer_lens"))
