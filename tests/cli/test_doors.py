"""The doors of the command line, class by class: a refusal is one sentence, and nothing is traced.

The cases are those of a review, in one process through `main`, and the table at the end counts
those that were tried, clean and bad. Clean is: status 2 and one sentence on standard error that
says what is named here, or status 0 where nothing is named.
"""

import collections
import contextlib
import io
import json
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rlhf_lab.__main__ import main
from rlhf_lab.config import RLHFArgs
from rlhf_lab.training import RLHFTrainer

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
    "deep JSON": ([*SMALL.split(), "--prompts", "deep.jsonl"], ["nested"]),
    "a text of every kind": (["score", "a great movie", "<b>[/b]", "\x1b[31m"], []),
}
CLASSES = {"options": OPTIONS, "seeds": SEEDS, "paths": PATHS, "texts": TEXTS}

NOTES = {
    "a list": [1],
    "a number": 3,
    "nothing": {},
    "phase of text": {"phase": "1"},
    "phase below 0": {"phase": -1},
    "phase as a flag": {"phase": True},
    "phase missing": {"phase": ...},
    "no schedule": {"scheduler": ...},
    "schedule of text": {"scheduler": "late"},
    "schedule of one rate": {"scheduler": {"last_epoch": 1, "_step_count": 2, "_last_lr": [0.1]}},
    "schedule without a count": {"scheduler": {"last_epoch": 1}},
    "kl_coef of text": {"kl_coef": "0.3"},
    "kl_coef nan": {"kl_coef": float("nan")},
    "kl_coef missing": {"kl_coef": ...},
    "best as a number": {"best": 3},
    "best without a phase": {"best": {"mean_reward": 1.0}},
    "moments of text": {"reward_moments": {"count": "1", "mean": 0.0, "m2": 0.0}},
    "moments below 0": {"reward_moments": {"count": 1, "mean": 0.0, "m2": -1.0}},
    "moments of another name": {"reward_moments": {"number": 1}},
}
TALLY: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    """Print what was tried, clean and bad (`pytest -s` shows it)."""
    yield
    for kind, found in TALLY.items():
        tried = sum(found.values())
        print(f"\n{kind:12} {tried:4} tried {found['clean']:4} clean {found['bad']:4} bad", end="")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of two of three phases, to be copied."""
    args = RLHFArgs(
        preset="reel", total_phases=3, batch_size=16, num_minibatches=2, warmup_steps=1, gen_len=8
    )
    trainer = RLHFTrainer(args, out=tmp_path_factory.mktemp("doors") / "RUN")
    for phase in trainer:
        if phase.phase == 1:
            trainer.request_stop()
    return trainer.run.path


@pytest.fixture
def here(finished, tmp_path, monkeypatch) -> Path:
    """A directory with a run of one's own, and files that are hard to read."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, tmp_path / "RUN")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000 + "\n")
    (tmp_path / "half.jsonl").write_text('{"prompt": "this \\ud800 film"}\n' * 4)
    return tmp_path


def at_the_door(kind: str, arguments: list[str], words: list[str]) -> None:
    """Run a command, and count whether it was clean."""
    bad = why_bad(arguments, words)
    TALLY[kind]["bad" if bad else "clean"] += 1
    assert not bad, bad


def why_bad(arguments: list[str], words: list[str]) -> str | None:
    """What is wrong with how a command ended; None if nothing is."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(arguments)
    except BaseException as error:
        return f"{type(error).__name__}: {error!s:.200}"
    if not words:
        return None if status == 0 else f"status {status}: {err.getvalue()}"
    lines = [line for line in err.getvalue().splitlines() if not line.startswith("Loading weights")]
    if status != 2 or len(lines) != 1:
        return f"status {status}, {lines!a:.400}"
    lacking = [word for word in words if word not in lines[0]]
    if lacking or not lines[0].endswith((".", ")")):
        return f"{lacking} not in {lines[0]!a}"
    return None


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, cases in CLASSES.items() for name in cases]
)
def test_a_bad_input_is_refused_in_one_sentence(here, kind: str, name: str) -> None:
    arguments, words = CLASSES[kind][name]
    at_the_door(kind, arguments, list(words))


@pytest.mark.parametrize("name", NOTES)
def test_a_checkpoint_with_notes_of_no_run_is_refused(here, name: str) -> None:
    change = NOTES[name]

    def changed(tensors: dict[str, Any], notes: dict[str, Any]) -> Any:
        if not isinstance(change, dict) or not change:
            return tensors, change
        return tensors, {k: v for k, v in (notes | change).items() if v is not ...}

    rewrite(here / "RUN" / "checkpoints" / "last.safetensors", changed)
    at_the_door("notes", ["resume", "RUN"], ["last.safetensors", "notes"])


def test_a_moment_of_another_shape_is_refused_by_its_name(here) -> None:
    def changed(tensors: dict[str, Any], notes: Any) -> Any:
        name = next(name for name in tensors if name.endswith(".exp_avg"))
        return tensors | {name: torch.zeros(3)}, notes

    rewrite(here / "RUN" / "checkpoints" / "last.safetensors", changed)
    at_the_door("notes", ["resume", "RUN"], ["exp_avg", "(3,)"])


@pytest.mark.parametrize("file", ["run.json", "metrics.jsonl"])
def test_a_run_with_json_of_great_depth_is_refused_by_its_file(here, file: str) -> None:
    (here / "RUN" / file).write_text("[" * 100_000 + "\n")
    for command in ("resume", "report"):
        at_the_door("run files", [command, "RUN"], [file])


@pytest.mark.process
def test_a_process_refuses_as_the_function_does(tmp_path) -> None:
    command = [sys.executable, "-m", "rlhf_lab", "train", "--preset", "reel", "--preset", "reel"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr == "rlhf_lab: --preset is given 2 times (reel, reel); give one.\n"


def rewrite(path: Path, change: Callable[[Any, Any], Any]) -> None:
    """Write a checkpoint anew with other contents and a checksum that fits them."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        tensors, notes = change(tensors, json.loads(file.metadata()["notes"]))
    written = json.dumps(notes)
    crc = zlib.crc32(written.encode())
    for name in sorted(tensors):
        raw = tensors[name].reshape(-1).view(torch.uint8).numpy()
        crc = zlib.crc32(raw, zlib.crc32(name.encode(), crc))
    save_file(tensors, path, metadata={"notes": written, "crc32": str(crc)})
