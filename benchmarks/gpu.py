"""Checks and timings on one CUDA device, in at most 175 s: `python -m benchmarks.gpu [PART ...]`.

Each line of the output is one measurement. To also time an older commit, unpack it before, and set
BASE to its directory: `git archive 1d9e632 rlhf_lab benchmarks | tar -x -C DIRECTORY`.
"""

import contextlib
import gc
import json
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.ours import bench_args
from benchmarks.work import SHAPES, Work, write_model
from benchmarks.worker import Clock, Setup, serve, synchronize
from rlhf_lab.config import RLHFArgs
from rlhf_lab.training import RLHFTrainer

CUDA = torch.cuda.is_available()
DEVICE, SHAPE = ("cuda", "medium") if CUDA else ("cpu", "nano")
START = time.perf_counter()
MODEL = Path(tempfile.gettempdir(), f"gpu-model-{SHAPE}")
PEAK = 989e12  # bf16 products per second of an H100 or H200 (SXM), without sparsity
deadline = 0.0  # of the current part, in seconds after START


def is_late() -> bool:
    """Return True after the deadline of the current part."""
    return time.perf_counter() - START > deadline


def report(name: str, **numbers: Any) -> None:
    """Print one measurement as JSON."""
    rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in numbers.items()}
    seconds = time.perf_counter() - START
    print(f"[{seconds:5.1f} s] {name}: {json.dumps(rounded, default=str)}", flush=True)


def make_setup(precision: str) -> Setup:
    """Return the work of `benchmarks`, on GPT-2-medium with random weights."""
    if not MODEL.exists():
        write_model(SHAPES[SHAPE], MODEL)
    return Work(shape=SHAPE, device=DEVICE, precision=precision if CUDA else "fp32").setup(MODEL)


def make_trainer(precision: str, **changes: Any) -> RLHFTrainer:
    """Return a trainer for this work; raise TimeoutError if there is no time for it."""
    if is_late():
        raise TimeoutError
    return RLHFTrainer(bench_args(make_setup(precision), **changes))


def load_phase(setup: Setup) -> Callable[[Clock], None]:
    """Load a trainer of the checkout on PYTHONPATH, with a hook at `site` if set, for phases.

    Unlike in `benchmarks.ours`, no callback runs between the parts of a learning step.
    """
    trainer, clocks = RLHFTrainer(bench_args(setup)), []
    if "site" in setup:
        trainer.policy.base_model.add_hook(setup["site"], lambda activation, hook: None)
    trainer.on("after_rollout")(lambda ctx: clocks[-1].lap("rollout/sampling"))
    trainer.on("after_score")(lambda ctx: clocks[-1].lap("rollout/scoring"))

    def phase(clock: Clock) -> None:
        clocks[:] = [clock]
        trainer.learning_phase(trainer.rollout_phase())
        trainer.phase += 1

    return phase


def compare() -> None:
    """Time phases of this checkout, of the one in BASE and of the naive loop, in turn."""
    from benchmarks.contestants import ROOT, ContestantProcess, interleave, start_command

    serving, base = [sys.executable, __file__, "serve"], os.environ.get("BASE")
    hook = {"site": "blocks.1.hook_resid_post"}
    rows = [("this, bf16", serving, make_setup("bf16"), ROOT)]
    rows += [("this, bf16, a hook that reads", serving, make_setup("bf16") | hook, ROOT)]
    rows += [("naive", start_command("naive"), make_setup("fp32"), ROOT)]
    for precision in ("bf16", "tf32") if base else ():
        rows.append((f"BASE, {precision}", serving, make_setup(precision), Path(base)))
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        started = list(pool.map(lambda row: ContestantProcess(*row), rows))
        contestants = [stack.enter_context(contextlib.closing(x)) for x in started]
        timings = interleave(contestants, repeats=1, warmups=2)
        while len(timings["naive"]) < 3 and not is_late():
            for name, phases in interleave(contestants, repeats=1, warmups=0).items():
                timings[name] += phases
    ours = median(x["seconds"] for x in timings["this, bf16"])
    for name, phases in timings.items():
        numbers = {x: median(phase[x] for phase in phases) for x in ("rollout", "learning")}
        seconds = median(x["seconds"] for x in phases)
        report(f"in turn: {name}", seconds=seconds, ratio=seconds / ours, **numbers)


def time_phases(name: str, trainer: RLHFTrainer, n: int = 5) -> Any:
    """Report the upper median of all phases but the first, and return the last rollout.

    After the deadline, two phases are enough. `peak` is the fraction of the card's bf16 products in
    the whole learning phase.
    """
    ends: list[float] = []
    trainer.on("after_rollout")(lambda ctx: ends.append(stamp()) and None)
    rows = []
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    while len(rows) < (2 if is_late() else n):
        began = stamp()
        rollout = trainer.rollout_phase()
        scored = stamp()
        trainer.learning_phase(rollout)
        rows.append((stamp() - began, ends[-1] - began, scored - ends[-1], stamp() - scored))
        trainer.phase += 1
    middle = sorted(rows[1:])[(len(rows) - 1) // 2]
    numbers = dict(zip(("phase", "sampling", "scoring", "learning"), middle, strict=True))
    memory = torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0
    graph, shape, args = trainer.step_graph, SHAPES[SHAPE], trainer.args
    n_weights = 12 * shape.n_layers * shape.d_model**2 + shape.d_model * shape.d_vocab
    n_products = 6 * n_weights * rollout.samples.tokens.numel() * args.batches_per_learning_phase
    numbers["tokens per s"] = args.batch_size * args.gen_len / numbers["sampling"]
    numbers["peak"] = n_products / numbers["learning"] / PEAK
    reason = graph and graph.reason
    report(name, **numbers, first=rows[0][0], phases=len(rows), GiB=memory, eager=reason)
    return rollout


def stamp() -> float:
    """Return the time when the device has finished."""
    synchronize(torch.device(DEVICE))
    return time.perf_counter()


def free(trainer: RLHFTrainer) -> None:
    """Release the graphs, in which a trainer that is still referenced holds memory."""
    trainer.forward.sampler = trainer.step_graph = None
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def phases() -> None:
    """Time phases in each precision and compare gradients; time bf16 without graphs."""
    for precision in ("bf16", "tf32", "fp32"):
        trainer = make_trainer(precision)
        rollout = time_phases(f"32 x 50, {precision}", trainer)
        if trainer.step_graph is not None:
            compare_gradients(trainer, rollout, precision)
        free(trainer)
    trainer = make_trainer("bf16", cuda_graphs=False)
    time_phases("32 x 50, bf16, cuda_graphs=False", trainer, 3)
    free(trainer)


def compare_gradients(trainer: RLHFTrainer, rollout: Any, precision: str) -> None:
    """Compare replayed gradients with autograd's on two minibatches."""
    from rlhf_lab.training.ppo import objective_terms
    from rlhf_lab.training.rollout import ReplayMemory

    memory, generator = ReplayMemory(rollout, 4, 1), torch.Generator().manual_seed(0)
    models, graph = (trainer.policy, trainer.reference), trainer.step_graph
    for minibatch in list(memory.get_minibatches(generator))[:2]:
        gradients = []
        for compute in (objective_terms, graph.replayed(objective_terms), objective_terms):
            trainer.optimizer.zero_grad()
            with trainer.forward.products():
                terms = compute(*models, minibatch, trainer.objective, 0.3)
                graph.backward(terms.objective)
            gradients.append(torch.cat([p.grad.flatten() for p in trainer.policy.parameters()]))
        eager, replayed, again = gradients
        norm = eager.norm()
        numbers = {"replayed": ((replayed - eager).norm() / norm).item()}
        numbers |= {"eager twice": ((again - eager).norm() / norm).item(), "reason": graph.reason}
        report(f"gradient, {precision}", **numbers, bitwise=torch.equal(eager, replayed))
    trainer.optimizer.zero_grad()


def check() -> None:
    """Compare the device with the CPU, and a resumed run with one that was not interrupted."""
    from rlhf_lab.doctor import compare_devices

    for finding in compare_devices():
        report("doctor", finding=finding)
    fields = {"preset": "reel", "total_phases": 3, "batch_size": 64, "warmup_steps": 1, "seed": 3}
    cases: dict[str, dict[str, Any]] = {"fp32": {}, "top_k": {"top_k": 5}, "LoRA": {"lora_rank": 4}}
    cases |= {"critic": {"value_head": "separate"}, "top_p": {"top_p": 0.9}}
    for name, more in cases.items():
        runs = [run_reel(device, **fields, **more) for device in ("cpu", DEVICE)]
        gaps = {
            key: abs(x - y)
            for reports in zip(*(numbers for _, numbers in runs), strict=True)
            for (key, x), y in zip(reports[0].items(), reports[1].values(), strict=True)
        }
        worst = sorted(gaps, key=gaps.get)[-2:]
        eager, _ = run_reel(DEVICE, **fields, **more, cuda_graphs=False)
        graph = runs[1][0].step_graph
        report(
            f"Reel on {DEVICE} and the CPU, {name}",
            **{k: gaps[k] for k in worst},
            without_graphs=(flat_weights(runs[1][0]) - flat_weights(eager)).abs().max().item(),
            reason=graph and graph.reason,
        )
    fields |= {"save_every": 1}
    whole, _ = run_reel(DEVICE, **fields)
    halved = RLHFTrainer(RLHFArgs(device=DEVICE, **fields), out=tempfile.mkdtemp() + "/run")
    for phase in halved:
        if phase.phase == 1:
            halved.request_stop()
    resumed = RLHFTrainer.resume(halved.run.path)
    resumed.train()
    is_equal = torch.equal(flat_weights(whole), flat_weights(resumed))
    report("Reel resumed after 2 of 3 phases", bitwise=is_equal)


def run_reel(device: str, **fields: Any) -> tuple[RLHFTrainer, list[dict[str, float]]]:
    """Train on Reel; return the trainer and the numbers of each report, without times."""
    if is_late():
        raise TimeoutError
    trainer = RLHFTrainer(RLHFArgs(device=device, **fields), out=tempfile.mkdtemp() + "/run")
    reports = [phase.to_dict() for phase in trainer]
    return trainer, [{k: v for k, v in r.items() if isinstance(v, float)} for r in reports]


def flat_weights(trainer: RLHFTrainer) -> torch.Tensor:
    """Return all weights of the policy as one vector."""
    return torch.cat([p.detach().flatten() for p in trainer.policy.parameters()])


def hooks() -> None:
    """Time phases with a hook, and compare samples with those of a sampler without graphs."""
    trainer = make_trainer("bf16")
    name = f"blocks.{trainer.policy.base_model.cfg.n_layers // 2}.hook_resid_post"
    trainer.policy.add_hook(name, lambda x, hook: 1.01 * x, is_permanent=True)
    time_phases("32 x 50, bf16, a hook on the residual stream", trainer, 3)
    samples = []
    for trainer.forward.graphs in (True, False):
        generator = torch.Generator().manual_seed(0)
        samples.append(trainer.sample(trainer.next_prompts(), generator).tokens)
    same = (samples[0] == samples[1]).float().mean().item()
    report("hooked samples, graphs and eager", same=same)
    free(trainer)


@patch("rlhf_lab.models.token_stats.FUSED_LOGITS", 2**27)
def large() -> None:
    """Time a large batch with and without torch.compile, and compare its log-probs."""
    from rlhf_lab.models import token_stats
    from rlhf_lab.training.rollout import ReplayMemory

    sizes = {"batch_size": 512, "gen_len": 124} if CUDA else {"batch_size": 8, "gen_len": 10}
    for is_fused in (False, True):
        token_stats.FUSED_LOGITS = 2**27 if is_fused else 2**62
        trainer = make_trainer("bf16", **sizes)
        label = " x ".join(map(str, sizes.values()))
        rollout = time_phases(f"{label}, bf16, torch.compile={is_fused}", trainer, 3)
        if is_fused:
            memory, generator = ReplayMemory(rollout, 4, 1), torch.Generator().manual_seed(0)
            minibatch, results = next(memory.get_minibatches(generator)), []
            for token_stats.FUSED_LOGITS in (2**27, 2**62):
                with torch.no_grad():
                    models = trainer.policy, trainer.reference
                    results.append(trainer.objective.run_policy(minibatch, *models))
            for field in ("logprobs", "entropy", "kl"):
                x, y = (getattr(result, field) for result in results)
                report(f"compiled {field}", gap=(x - y).abs().max().item())
        free(trainer)


def memory() -> None:
    """Time phases with the blocks of the reference on the CPU, and count synchronizations."""
    for device in (None, "cpu"):
        trainer = make_trainer("bf16", reference_device=device)
        time_phases(f"32 x 50, bf16, reference_device={device}", trainer, 2)
        if CUDA and device is None:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                trainer.learning_phase(trainer.rollout_phase())
                torch.cuda.set_sync_debug_mode("default")
            waits = sum("called a synchronizing" in str(x.message) for x in caught)
            report("host synchronizations in a phase", n=waits)
        free(trainer)


PARTS: dict[str, tuple[Callable[[], None], int]] = {  # with seconds, scaled to 160 for all parts
    "compare": (compare, 50), "phases": (phases, 40), "hooks": (hooks, 10), "large": (large, 35),
    "memory": (memory, 10), "check": (check, 20),
}  # fmt: skip

if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve(load_phase, ("torch", "transformers"))
        sys.exit()
    watchdog = threading.Timer(170, lambda: report("ended, unfinished") or os._exit(1))
    watchdog.daemon, names = True, sys.argv[1:] or list(PARTS)
    watchdog.start()
    for name in names:
        deadline += 160 * PARTS[name][1] / sum(PARTS[x][1] for x in names)
        try:
            PARTS[name][0]()
        except TimeoutError:
            report(f"{name}: the rest is skipped", deadline=deadline)
