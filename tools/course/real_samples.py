"""Reviews of a real model in lesson 00: `python -m tools.course.real_samples`, with real models.

Trains preset smol on the models in RLHF_LAB_REAL_MODELS, for about ten minutes, and stores the
first reviews of three phases.
"""

import os
import tempfile
from functools import cache
from pathlib import Path

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.training.run_dir import SAMPLES
from tools.course.runner import REAL_MODELS
from tools.course.stored_parts import make_record

PHASES, REVIEWS = (0, 5, 30), 3


@cache
def reviews() -> dict[int, list[dict]]:
    """Train, and return all lines of samples.jsonl by phase; the last phase is the evaluation."""
    models = Path(os.environ[REAL_MODELS])
    found = {
        "base_model": str(models / "smollm2"),
        "reward_model": str(models / "minilm-sentiment"),
    }
    with tempfile.TemporaryDirectory() as directory:
        trainer = RLHFTrainer(
            RLHFArgs(preset="smol", keep_checkpoints=0, **found), out=Path(directory, "run")
        )
        trainer.train()
        lines = trainer.run.read(SAMPLES)
    return {phase: [line for line in lines if line["phase"] == phase] for phase in PHASES}


def means() -> list[list]:
    """Return each phase, its mean reward, and in how many reviews "bad" is a word."""
    is_bad = lambda line: "bad" in line["response"].translate(str.maketrans('.,"', "   ")).split()
    return [
        [phase, sum(x["reward"] for x in lines) / len(lines), sum(map(is_bad, lines))]
        for phase, lines in reviews().items()
    ]


def samples() -> list[list]:
    """Return the phase, reward and text of the first reviews of each phase."""
    return [
        [phase, line["reward"], " ".join(line["text"].split())]
        for phase, lines in reviews().items()
        for line in lines[:REVIEWS]
    ]


if __name__ == "__main__":
    make_record("real_samples", "real_samples", {"means": means, "samples": samples}, digits=4)
