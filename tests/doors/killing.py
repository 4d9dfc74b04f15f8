"""Runs that are killed where a seeded generator says, and resumed until they are done.

The killed process itself writes where it was: a line in a trace for each event, each write of
run.json, each line that is added, and the begin, middle and end of each checkpoint's file. So the
moments are spread over all that a run does, however fast the machine is.
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
    """What came of runs that were killed.

    Attributes:
        runs, equal: how many were finished, and how many of them as if never killed.
        kills: how often each signal was sent.
        places: where the runs were then.
        complaints: what was said on standard error that should not be.
    """

    runs: int
    equal: int
    kills: collections.Counter
    places: collections.Counter
    complaints: list[str]


def kill_runs(python: WarmPython, home: Path, kills: int, seed: int = 0) -> Outcome:
    """Train and extend runs with changed settings, and kill them, until so many kills are done.

    Every second one is trained already, so that it is killed while it is extended.
    """
    rng, outcome = random.Random(seed), Outcome(0, 0, *_counters(), [])
    trained, whole = home / "trained", home / "whole"
    moments = _run(python, home, NEVER, "SIGKILL", ["train", *TRAIN, "--out", trained]).moments
    shutil.copytree(trained, whole)
    _run(python, home, NEVER, "SIGKILL", ["resume", whole, *CHANGES])
    runs = equal = 0
    while outcome.kills.total() < kills:
        out = home / f"run{runs}"
        if runs % 2 == 0:
            shutil.copytree(trained, out)
        _until_done(python, out, rng, moments, outcome)
        runs += 1
        equal += is_equal(out, whole)
        shutil.rmtree(out)
    return outcome._replace(runs=runs, equal=equal)


def _counters() -> tuple[collections.Counter, collections.Counter]:
    return collections.Counter(), collections.Counter()


class _Ended(NamedTuple):
    status: int
    moments: int
    killed_at: str | None
    error: str


def _run(python: WarmPython, home: Path, at: int, signal: str, arguments: list[Any]) -> _Ended:
    """Run a command that sends itself a signal at its `at`-th moment."""
    trace = home / "trace"
    trace.unlink(missing_ok=True)
    command = ["-c", TRACED, str(trace), str(at), signal, *map(str, arguments)]
    done = python.run(command)
    places = trace.read_text().split() if trace.exists() else []
    where = places[places.index("killed") - 1] if "killed" in places else None
    return _Ended(done.returncode, len(places), where, done.stderr)


def _until_done(
    python: WarmPython, out: Path, rng: random.Random, moments: int, outcome: Outcome
) -> None:
    """Train, then extend with changes; what was stopped goes on, however often it is."""
    extended = out.exists()
    while True:
        arguments = ["resume", out]
        if not (out / "run.json").exists():  # killed before there was a run
            shutil.rmtree(out, ignore_errors=True)
            arguments = ["train", *TRAIN, "--out", out]
        elif extended and not json.loads((out / "run.json").read_text())["changes"]:
            arguments += CHANGES
        signal = rng.choice(SIGNALS)
        ended = _run(python, out.parent, rng.randint(1, moments), signal, arguments)
        if ended.killed_at is not None:
            outcome.kills[signal] += 1
            outcome.places[ended.killed_at] += 1
        if "Traceback" in ended.error:
            outcome.complaints.append(ended.error)
        if ended.status == 0:
            if extended:
                return
            extended = True


def is_equal(found: Path, expected: Path) -> bool:
    """Whether two finished runs are equal to the bit, and nothing is left over in the first."""
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
