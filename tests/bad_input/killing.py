"""Runs that are killed at moments from a seeded generator and resumed until they are finished.

The process itself traces its moments: each event, each write of run.json, each line that is
appended, and the start, middle and end of each checkpoint's file.
"""

import collections
import json
import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from tests.warm import WarmPython

TRAIN = (
    "--preset reel --total-phases 4 --batch-size 8 --num-minibatches 2 --warmup-steps 1 "
    "--gen-len 8 --kl-controller adaptive --kl-target 0.05 --kl-horizon 50"
).split()
CHANGES = "--total-phases 6 --base-lr 1e-4 --kl-coef 0.7 --save-every 2".split()
SIGNALS = ["SIGKILL"] * 6 + ["SIGTERM", "SIGHUP", "SIGINT"]
NEVER = 10**9

TRACED = """
import os, signal, sys, threading

import rlhf_lab.training
from rlhf_lab.__main__ import main
from rlhf_lab.training import RLHFTrainer, checkpoint
from rlhf_lab.training.run_dir import RunDir

for number in (signal.SIGHUP, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)
trace = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT, 0o644)
at, name = int(sys.argv[2]), sys.argv[3]
noted, lock = [], threading.Lock()


def note(place):
    with lock:
        noted.append(place)
        os.write(trace, (place + "\\n").encode())
        if len(noted) == at:
            os.write(trace, b"killed\\n")
            os.kill(os.getpid(), getattr(signal, name))


EVENTS = {
    "rollout": "run_start after_rollout after_score",
    "learning": "before_minibatch after_loss after_backward after_step",
    "between": "after_phase",
}


class Traced(RLHFTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for half, events in EVENTS.items():
            for event in events.split():

                def listen(ctx, half=half):
                    note(half)

                listen.__name__ = f"trace_{event}"
                self.on(event)(listen)


def around(place, function):
    def traced(*arguments):
        note(place)
        function(*arguments)
        note(place)

    return traced


save_file = checkpoint.save_file


def save(tensors, path, metadata):
    note("checkpoint")
    path.write_bytes(b"half of a file")
    note("checkpoint")
    save_file(tensors, path, metadata=metadata)
    note("checkpoint")


rlhf_lab.training.RLHFTrainer, checkpoint.save_file = Traced, save
RunDir.write_info = around("run.json", RunDir.write_info)
RunDir.append = around("lines", RunDir.append)
sys.exit(main(sys.argv[4:]))
"""


class Outcome(NamedTuple):
    """Finished runs, those of them that equal an uninterrupted run, and kills by signal."""

    runs: int
    equal: int
    kills: collections.Counter
    complaints: list[str]


def kill_runs(python: WarmPython, home: Path, kills: int, seed: int = 0) -> Outcome:
    """Train and extend runs with changed settings, and kill them, until so many kills are done.

    Every second one is trained already, so that it is killed while it is extended.
    """
    rng, counts, complaints = random.Random(seed), collections.Counter(), []
    trained, whole = home / "trained", home / "whole"
    moments, _ = _run(python, home, NEVER, "SIGKILL", ["train", *TRAIN, "--out", trained])
    shutil.copytree(trained, whole)
    _run(python, home, NEVER, "SIGKILL", ["resume", whole, *CHANGES])
    runs = equal = 0
    while counts.total() < kills:
        out = home / f"run{runs}"
        if runs % 2 == 0:
            shutil.copytree(trained, out)
        _until_done(python, out, rng, moments, counts, complaints)
        runs += 1
        equal += is_equal(out, whole)
        shutil.rmtree(out)
    return Outcome(runs, equal, counts, complaints)


def _run(python: WarmPython, home: Path, at: int, signal: str, arguments: list[Any]) -> Any:
    """Run a command that sends itself a signal at its `at`-th moment."""
    trace = home / "trace"
    trace.unlink(missing_ok=True)
    done = python.run(["-c", TRACED, str(trace), str(at), signal, *map(str, arguments)])
    return (trace.read_text() if trace.exists() else "").count("\n"), done


def _until_done(
    python: WarmPython,
    out: Path,
    rng: random.Random,
    moments: int,
    counts: collections.Counter,
    complaints: list[str],
) -> None:
    """Train, then extend with changes, and resume after each kill."""
    extended = out.exists()
    while True:
        arguments = ["resume", out]
        if not (out / "run.json").exists():  # killed before there was a run
            shutil.rmtree(out, ignore_errors=True)
            arguments = ["train", *TRAIN, "--out", out]
        elif extended and not json.loads((out / "run.json").read_text())["changes"]:
            arguments += CHANGES
        signal = rng.choice(SIGNALS)
        _, done = _run(python, out.parent, rng.randint(1, moments), signal, arguments)
        if "killed" in (out.parent / "trace").read_text().split():
            counts[signal] += 1
        if "Traceback" in done.stderr:
            complaints.append(done.stderr)
        if done.returncode == 0:
            if extended:
                return
            extended = True


def is_equal(found: Path, expected: Path) -> bool:
    """Return True if two finished runs are bitwise equal and no partial file is left."""
    infos = [json.loads((run / "run.json").read_text()) for run in (found, expected)]
    return (
        all(_same_tensors(found, expected, name) for name in ("last", "best"))
        and _metrics(found) == _metrics(expected)
        and (found / "samples.jsonl").read_bytes() == (expected / "samples.jsonl").read_bytes()
        and all(infos[0][key] == infos[1][key] for key in ("status", "final", "changes"))
        and not (found / "run.lock").exists()
        and not list(found.rglob("*.partial"))
    )


def _same_tensors(found: Path, expected: Path, name: str) -> bool:
    a, b = (load_file(run / f"checkpoints/{name}.safetensors") for run in (found, expected))
    return a.keys() == b.keys() and all(torch.equal(tensor, b[key]) for key, tensor in a.items())


def _metrics(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name != "cost"} for line in lines]
