"""Runs that are killed at moments from a seeded generator and resumed until they are finished.

The process itself counts its moments: each event, each write of run.json, each line that is
appended, and the start, middle and end of each checkpoint's file.
"""

import collections
import json
import random
import shutil
from pathlib import Path
from typing import Any

from tests.training.recorded_runs import assert_same_run
from tests.warm import WarmPython

TRAIN = (
    "--preset reel --total-phases 4 --batch-size 8 --num-minibatches 2 --warmup-steps 1 "
    "--gen-len 8 --kl-controller adaptive --kl-target 0.05 --kl-horizon 50"
).split()
CHANGES = "--total-phases 6 --base-lr 1e-4 --kl-coef 0.7 --save-every 2".split()
SIGNALS = ["SIGKILL"] * 6 + ["SIGTERM", "SIGHUP", "SIGINT"]
NEVER = 10**9
COUNTED = """
import itertools, os, signal, sys

import rlhf_lab.training
from rlhf_lab.__main__ import main
from rlhf_lab.training import RLHFTrainer, RunDir, checkpoint

for number in (signal.SIGHUP, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)
trace, at, name = open(sys.argv[1], "wb", 0), int(sys.argv[2]), sys.argv[3]
moments = itertools.count(1)
EVENTS = "run_start after_rollout after_score before_minibatch after_loss after_backward after_step"


def note(*_):
    trace.write(b".")
    if next(moments) == at:
        trace.write(b"killed")
        os.kill(os.getpid(), getattr(signal, name))


class Counted(RLHFTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for event in (*EVENTS.split(), "after_phase"):
            self.on(event)(lambda ctx: note())


def around(function):
    def counted(*arguments):
        note()
        function(*arguments)
        note()

    return counted


save_file = checkpoint.save_file


def save(tensors, path, metadata):
    note()
    path.write_bytes(b"half of a file")
    note()
    save_file(tensors, path, metadata=metadata)
    note()


rlhf_lab.training.RLHFTrainer, checkpoint.save_file = Counted, save
RunDir.write_info, RunDir.append = around(RunDir.write_info), around(RunDir.append)
sys.exit(main(sys.argv[4:]))
"""


def kill_runs(python: WarmPython, home: Path, kills: int, seed: int = 0) -> collections.Counter:
    """Kill runs while they are trained and extended; each must end as an uninterrupted one.

    Returns the kills by signal, at least `kills` in total.
    """
    rng, counts, whole = random.Random(seed), collections.Counter(), home / "whole"
    _, trace = _run(python, home, NEVER, "SIGKILL", ["train", *TRAIN, "--out", whole])
    _run(python, home, NEVER, "SIGKILL", ["resume", whole, *CHANGES])
    while counts.total() < kills:
        _train_and_extend(python, home / "run", rng, trace.count("."), counts)
        assert_same_run(home / "run", whole)
        changes = [
            json.loads((r / "run.json").read_text())["changes"] for r in (home / "run", whole)
        ]
        assert changes[0] == changes[1] and not (home / "run" / "run.lock").exists()
        assert not list((home / "run").rglob("*.partial"))
        shutil.rmtree(home / "run")
    return counts


def _run(
    python: WarmPython, home: Path, at: int, signal: str, arguments: list[Any]
) -> tuple[int, str]:
    """Run a command that sends itself a signal at its `at`-th moment; return status and trace."""
    done = python.run(["-c", COUNTED, str(home / "trace"), str(at), signal, *map(str, arguments)])
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, (home / "trace").read_text()


def _train_and_extend(
    python: WarmPython, out: Path, rng: random.Random, moments: int, counts: collections.Counter
) -> None:
    """Train, then extend with changes, and resume after each kill."""
    is_trained = False
    while True:
        arguments = ["resume", out]
        if not (out / "run.json").exists():  # killed before there was a run
            shutil.rmtree(out, ignore_errors=True)
            arguments = ["train", *TRAIN, "--out", out]
        elif is_trained and not json.loads((out / "run.json").read_text())["changes"]:
            arguments += CHANGES
        signal = rng.choice(SIGNALS)
        status, trace = _run(python, out.parent, rng.randint(1, moments), signal, arguments)
        counts[signal] += "killed" in trace
        if status == 0:
            if is_trained:
                return
            is_trained = True
