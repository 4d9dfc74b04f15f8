"""Bytes that the processes of one run send, and differences of their numbers from one process.

python -m benchmarks.parallel
python -m benchmarks.parallel --processes 4 --kinds fsdp --phases 1

Times are shown where each process has a GPU of its own: two processes on one CPU share its cores.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from rich.console import Console
from rich.progress import track

from rlhf_lab.config import RLHFArgs
from rlhf_lab.course.tables import show_table
from rlhf_lab.entry import run_program
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.training import RLHFTrainer

Kind = Literal["ddp", "fsdp"]
Table = tuple[list[str], list[list[Any]]]
OF_A_PROCESS = ("cost",)
"""What a report says of a process, and not of the run."""
SPEEDS = ("rollout_tokens_per_second", "learning_tokens_per_second")


class Run(NamedTuple):
    """What a run on several processes told: the main one's numbers.

    Attributes:
        reports: by phase, the numbers of a report by name.
        sent: bytes that the main process has sent, by purpose.
        n_weights: how many weights learn.
        n_steps: optimizer steps.
    """

    reports: list[dict[str, Any]]
    sent: dict[str, int]
    n_weights: int
    n_steps: int


def run_in_this_process(settings: dict[str, Any], place: Path) -> None:
    """Run as one of the processes that torchrun started; the main one writes what it found."""
    trainer = RLHFTrainer(RLHFArgs(**settings), out=place / "run")
    reports = [trainer.run_phase().to_dict() for _ in range(trainer.args.total_phases)]
    args = trainer.args
    n_steps = len(reports) * args.num_minibatches * args.batches_per_learning_phase
    learned = sum(p.numel() for p in trainer.policy.parameters() if p.requires_grad)
    if trainer.world.is_main:
        found = Run(reports, dict(trainer.world.bytes_sent), learned, n_steps)
        (place / "found.json").write_text(json.dumps(found))
    trainer.world.leave()


def run_of(processes: int, settings: dict[str, Any]) -> Run:
    """A run under torchrun.

    Raises:
        RunError: it failed; its own message is above.
    """
    with tempfile.TemporaryDirectory() as place:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", f"{processes}"]
        this = ["-m", "benchmarks.parallel", "--worker", json.dumps(settings), place]
        env = {"OMP_NUM_THREADS": "1"} | os.environ
        status = subprocess.run([sys.executable, *launch, *this], env=env, check=False).returncode
        if status:
            raise RunError(f"a run on {processes} processes ended with status {status}.")
        return Run(*json.loads((Path(place) / "found.json").read_text()))


def furthest(one: Run, other: Run) -> list[float]:
    """By phase, the largest difference of two runs' numbers, relative where a number is above 1."""
    gaps = []
    for before, after in zip(one.reports, other.reports, strict=True):
        pairs = [(x, after[name]) for name, x in _numbers(before).items()]
        gaps.append(max(abs(y - x) / max(1.0, abs(x)) for x, y in pairs))
    return gaps


def _numbers(report: dict[str, Any]) -> dict[str, int | float]:
    numbers = {name: x for name, x in report.items() if isinstance(x, int | float)}
    return {name: x for name, x in numbers.items() if name not in OF_A_PROCESS}


def measure_parallel(
    processes: int = 2,
    kinds: tuple[Kind, ...] = ("ddp", "fsdp"),
    preset: str = "reel",
    phases: int = 3,
) -> int:
    """Run the same phases in one process and in several, and show what was sent and how they agree.

    Args:
        processes: how many on this machine.
        kinds: what each holds of the weights.
        preset: of the settings.
        phases: how many each run has.

    Raises:
        ConfigError: fewer than two processes, no phases, or settings that cannot be dealt.
    """
    if processes < 2 or phases < 1:
        wrong = f"processes={processes}" if processes < 2 else f"phases={phases}"
        raise ConfigError(f"{wrong} is too few; compare 2 or more processes over 1 or more phases.")
    has_gpus = torch.cuda.device_count() >= processes
    settings = {"preset": preset, "total_phases": phases, "device": "auto" if has_gpus else "cpu"}
    asked = {"one process": (1, settings)} | {
        kind: (processes, settings | {"parallel": kind}) for kind in kinds
    }
    console = Console(stderr=True)
    runs = {name: run_of(*asked[name]) for name in track(asked, "running", console=console)}
    alone = runs.pop("one process")
    print(f"{alone.n_weights:,} weights that learn, {alone.n_steps} steps, {processes} processes\n")
    print("bytes that each process sends")
    show_table(*sent_of(runs, lambda run, sent: f"{sent:,}"))
    print("the same, per weight and optimizer step")
    show_table(*sent_of(runs, lambda run, sent: f"{sent / run.n_weights / run.n_steps:.2f}"))
    print("largest difference of any number of a report from one process's")
    gaps = {kind: furthest(alone, run) for kind, run in runs.items()}
    rows = [[phase, *(f"{found[phase]:.1e}" for found in gaps.values())] for phase in range(phases)]
    show_table(["phase", *gaps], rows)
    if has_gpus:
        show_table(*speeds_of({"one process": alone} | runs), digits=0)
    return 0


def sent_of(runs: dict[str, Run], shown: Callable[[Run, int], str]) -> Table:
    """Headings and rows: what the runs sent, by purpose, as a function writes it."""
    purposes = sorted({purpose for run in runs.values() for purpose in run.sent})
    rows = [
        [purpose, *(shown(run, run.sent.get(purpose, 0)) for run in runs.values())]
        for purpose in purposes
    ]
    return ["purpose", *runs], rows


def speeds_of(runs: dict[str, Run]) -> Table:
    """Headings and rows: tokens per second of the runs, medians over phases."""
    of = lambda run, name: median(report["cost"][name] for report in run.reports)
    rows = [[name, *(of(run, name) for run in runs.values())] for name in SPEEDS]
    return ["median over phases", *runs], rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    if sys.argv[1:2] == ["--worker"]:
        run_in_this_process(json.loads(sys.argv[2]), Path(sys.argv[3]))
        return 0
    return run_program(measure_parallel, "benchmarks.parallel", arguments)


if __name__ == "__main__":
    sys.exit(main())
