"""A run on a real model (GPT-2), in a separate process, to measure its peak memory.

`python -m benchmarks.results.real` is this process: see `benchmarks.worker.serve`.
"""

import ctypes
import dataclasses
import gc
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.contestants import ContestantProcess
from benchmarks.results.settings import Row
from benchmarks.worker import Clock, Setup, serve
from rlhf_lab.config import RLHFArgs
from rlhf_lab.models.cpu_tuning import tune_for
from rlhf_lab.training import RLHFTrainer

Figures = dict[str, Any]
KEPT = ("phase", "mean_reward", "kl_per_sequence")


def run_real(row: Row, seed: int, models: tuple[Path, Path], threads: int) -> Figures:
    """Train a model of these directories; returns memory, and the reward of each phase."""
    language_model, classifier = map(str, models)
    args = dataclasses.replace(
        row.args(seed), base_model=language_model, reward_model=classifier, device="cpu"
    )
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory, "run")
        setup = {"args": args.to_dict(), "out": str(run), "threads": threads}
        command = [sys.executable, "-m", "benchmarks.results.real"]
        process = ContestantProcess(row.name, command, setup | {"seed": seed, "device": "cpu"})
        peaks = [process.phase()["peak_bytes"] for _ in range(args.total_phases)]
        process.close()
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        counted = json.loads((run / COUNTED).read_text(encoding="utf-8"))
    loaded = process.about["loaded_bytes"]
    return {
        "threads": threads,
        "memory": {**counted, "loaded_bytes": loaded},
        "curve": [
            {**{name: json.loads(line)[name] for name in KEPT}, "peak_bytes": peak}
            for line, peak in zip(lines, peaks, strict=True)
        ],
    }


COUNTED = "counted.json"


def load(setup: Setup) -> Callable[[Clock], None]:
    """Load a trainer; returns a function that runs one phase."""
    args = RLHFArgs(**setup["args"])
    trainer = RLHFTrainer(args, out=setup["out"])
    tune_for(trainer.policy, args.cpu_tuning)
    release_memory()

    def phase(clock: Clock) -> None:
        trainer.run_phase()
        counted = json.dumps(counted_bytes(trainer))
        Path(setup["out"], COUNTED).write_text(counted, encoding="utf-8")

    return phase


def release_memory() -> None:
    """Return freed memory to the system, so it does not count as the models'."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def counted_bytes(trainer: RLHFTrainer) -> dict[str, int]:
    """Count the bytes of all weights, of trained weights, and of the optimizer's state."""
    models = (trainer.policy, trainer.reference)
    weights = {p.data_ptr(): p for model in models for p in model.parameters()}
    state = [t for held in trainer.optimizer.state.values() for t in held.values()]
    return {
        "weight_bytes": sum(p.nbytes for p in weights.values()),
        "learning_bytes": sum(p.nbytes for p in weights.values() if p.requires_grad),
        "optimizer_bytes": sum(t.nbytes for t in state),
    }


if __name__ == "__main__":
    serve(load, ("torch", "transformers", "transformer_lens"))
