"""Options, seeds, paths and texts that a command cannot take."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.doors.door import accepted, refused

SMALL = "train --total-phases 1 --batch-size 16 --num-minibatches 2 --warmup-steps 0 --gen-len 8"
LONG = "x" * 300
HALF = "\udcff"
MODELS = ["--pairs", "reel", "--out", "made"]
NO_SEED = ("seed", "below 2**63")

OPTIONS = {
    "preset twice": (["train", "--preset", "reel", "--preset", "gpt2-small"], ["--preset", "2"]),
    "preset twice, =": (["train", "--preset=reel", "--preset=reel"], ["--preset", "2 times"]),
    "preset twice, mixed": (["train", "--preset=reel", "--preset", "tldr"], ["reel, tldr"]),
    "preset without a name": (["train", "--preset"], ["needs a name"]),
    "checkpoint as a power": (["sample", "RUN", "--checkpoint", "²"], ["names no checkpoint"]),
    "checkpoint of 300 digits": (["sample", "RUN", "--checkpoint", "7" * 300], ["checkpoint"]),
    "checkpoint of 5000 digits": (["sample", "RUN", "--checkpoint", "7" * 5000], ["checkpoint"]),
    "checkpoint elsewhere": (["sample", "RUN", "--checkpoint", "../last"], ["names no checkpoint"]),
    "checkpoint below 0": (["sample", "RUN", "--checkpoint", "-1"], ["out of range"]),
    "checkpoint empty": (["export", "RUN", "made", "--checkpoint", ""], ["names no checkpoint"]),
    "checkpoint unknown": (["sample", "RUN", "--checkpoint", "lsat"], ["there is no checkpoint"]),
    "more samples than memory": (["sample", "RUN", "-n", "9" * 14], ["memory"]),
}
SEEDS = {
    f"{name} {seed}": ([*command, "--seed", str(seed)], NO_SEED)
    for name, command in {
        "train": SMALL.split(),
        "sample": ["sample", "RUN"],
        "train-reward": ["train-reward", *MODELS],
        "dpo": ["dpo", *MODELS],
        "sft": ["sft", "--texts", "reel", "--out", "made"],
    }.items()
    for seed in (-1, 2**63, 2**64, 10**30)
}
PATHS = {
    "train, long": ([*SMALL.split(), "--out", "x" * 5000], ["characters", "too long"]),
    "resume, long": (["resume", LONG], ["300 characters"]),
    "sample, long": (["sample", LONG], ["300 characters"]),
    "report, long": (["report", LONG], ["300 characters"]),
    "report to a long name": (["report", "RUN", "--out", LONG], ["too long"]),
    "sft, long": (["sft", "--texts", "reel", "--out", LONG], ["300 characters"]),
    "sft of a long name": (["sft", "--texts", LONG, "--out", "made"], ["too long"]),
    "export to a long name": (["export", "RUN", LONG], ["too long"]),
    "sample of no user": (["sample", "~nouser"], ["~nouser"]),
    "train of no user": ([*SMALL.split(), "--base-model", "~nouser"], ["~nouser"]),
    "reward of no user": ([*SMALL.split(), "--reward-model", "~nouser/x"], ["~nouser/x"]),
    "prompts of no user": ([*SMALL.split(), "--prompts", "~nouser/p.txt"], ["~nouser/p.txt"]),
    "resume of no user": (["resume", "~nouser/x"], ["~nouser/x"]),
}
TEXTS = {
    "half a character to score": (["score", f"good {HALF}"], ["UTF-8"]),
    "half a character to sample": (["sample", "RUN", "--prompt", f"this {HALF}"], ["prompt"]),
    "half a character as prefix": ([*SMALL.split(), "--prefix", f"this {HALF}"], ["prompt"]),
    "half a character in JSON": ([*SMALL.split(), "--prompts", "half.jsonl"], ["prompt"]),
    "deep JSON": ([*SMALL.split(), "--prompts", "deep.jsonl"], ["deep.jsonl", "recursion"]),
    "a text of every kind": (["score", "a great movie", "<b>[/b]", "\x1b[31m"], []),
}
CASES = OPTIONS | SEEDS | PATHS | TEXTS


@pytest.mark.parametrize("name", CASES)
def test_an_option_that_cannot_be(here: Path, name: str) -> None:
    (here / "deep.jsonl").write_text("[" * 100_000 + "\n")
    (here / "half.jsonl").write_text('{"prompt": "this \\ud800 film"}\n' * 4)
    arguments, words = CASES[name]
    if words:
        refused(arguments, *words)
    else:
        accepted(arguments)


@pytest.mark.process
def test_a_process_refuses_as_the_function_does(tmp_path) -> None:
    command = [sys.executable, "-m", "rlhf_lab", "train", "--preset", "reel", "--preset", "reel"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr == "rlhf_lab: --preset is given 2 times (reel, reel); give one.\n"
