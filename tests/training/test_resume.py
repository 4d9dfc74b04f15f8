"""Resumed runs equal uninterrupted ones: for every kind of state, and after every signal."""

import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_lab.__main__ import main
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.run_dir import LOCK
from tests.training.recorded_runs import CONFIGURATIONS, assert_same_run, copy_weights, is_equal

TRAIN = (
    "train --preset reel --total-phases 5 --batch-size 8 --num-minibatches 2 --warmup-steps 1"
    " --gen-len 8 --top-k 12 --keep-checkpoints 1 --out"
).split()
DRIVER = """
import json, os, signal, sys
from pathlib import Path

import rlhf_lab.training
from rlhf_lab.__main__ import main
from rlhf_lab.training import RLHFTrainer, RunDir, checkpoint

where, phase, names, *arguments = sys.argv[1:]
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
save_file, append, write_info = checkpoint.save_file, RunDir.append, RunDir.write_info


def stop(is_here=True):
    for name in names.split() if is_here else ():
        os.kill(os.getpid(), getattr(signal, name))


def save_half(tensors, path, metadata):
    save_file(tensors, path, metadata=metadata)
    if where in str(path) and json.loads(metadata["metadata"])["phase"] == int(phase):
        os.truncate(path, os.path.getsize(path) // 2)
        stop()


def append_half(run, file, records):
    if file == where and records[0]["phase"] == int(phase):
        with open(run.path / file, "a") as out:
            out.write(json.dumps(records[0])[:50])
        stop()
    append(run, file, records)


def write_half(run, info):
    if where == "run.json" and info["phases_done"] == int(phase):
        Path(run.path, ".run.json.partial").write_text(json.dumps(info)[:40])
        stop()
    write_info(run, info)


class Stopped(RLHFTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if "." not in where:
            self.on(where)(lambda ctx: stop(ctx.phase == int(phase)))


checkpoint.save_file, RunDir.append, RunDir.write_info = save_half, append_half, write_half
rlhf_lab.training.RLHFTrainer = Stopped
sys.exit(main(arguments))
"""
# an event, or a file that is then half written; a phase; `save_every`
KILLS = [
    ("run_start", 0, 1),
    ("after_score", 3, 1),
    ("after_step", 0, 1),
    ("after_backward", 2, 3),
    ("after_phase", 1, 1),
    ("checkpoint", 5, 1),
    (".best.safetensors", 0, 1),
    (".phase_000004.safetensors", 4, 1),
    (".last.safetensors", 3, 1),
    ("run.json", 1, 1),
    ("metrics.jsonl", 2, 1),
    ("samples.jsonl", 4, 3),
]
SIGNALS = [
    ("SIGINT", "after_rollout", 2, 130, 3),
    ("SIGINT SIGINT", "after_backward", 2, 130, 2),
    ("SIGTERM", "after_rollout", 2, 128 + 15, 3),
    ("SIGHUP SIGHUP", "after_backward", 2, 128 + 1, 3),
    ("SIGINT", "after_rollout", 4, 0, 5),
]


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_resumed_run_equals_uninterrupted_run(runs, resumed, name):
    """The latter has callbacks at every event, which therefore change nothing."""
    whole, again = runs(name), resumed(name)
    assert_same_run(again.run.path, whole.path)
    assert is_equal(copy_weights(again.policy), whole.weights[-1])
    assert is_equal(copy_weights(again.reference), copy_weights(whole.trainer.reference))
    assert not is_equal(whole.weights[-1], whole.weights[0])
    assert all(weight.isfinite().all() for weight in whole.weights[-1].values())


@pytest.fixture
def stop(warm_python, tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `train` in a process that sends itself signals."""

    def run(where: str, phase: int, signals: str, *more: Any) -> subprocess.CompletedProcess[str]:
        arguments = [where, phase, signals, *TRAIN, tmp_path / "run", *more]
        return warm_python.run(["-c", DRIVER, *map(str, arguments)])

    return run


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    assert main([*TRAIN, str(out)]) == 0
    return out


@pytest.mark.parametrize(("where", "phase", "save_every"), KILLS)
def test_killed_run_equals_uninterrupted_run(
    stop, uninterrupted, tmp_path, where, phase, save_every
):
    killed = stop(where, phase, "SIGKILL", "--save-every", save_every)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert_same_run(tmp_path / "run", uninterrupted)
    assert not list(tmp_path.rglob("*.partial")) and not (tmp_path / "run" / LOCK).exists()


@pytest.mark.parametrize(("signals", "event", "phase", "status", "done"), SIGNALS)
def test_signals_finish_the_phase_and_save(
    stop, uninterrupted, tmp_path, capsys, signals, event, phase, status, done
):
    """A second Ctrl-C ends the run at once, without its phase."""
    stopped, out = stop(event, phase, signals), tmp_path / "run"
    assert stopped.returncode == status and "Traceback" not in stopped.stderr
    words = rf"stopped after {done} of 5 phases; .*: python -m rlhf_lab resume {out}"
    assert bool(re.search(words, stopped.stdout)) == (done < 5)
    assert f"phase {done - 1} |" in stopped.stdout and f"phase {done} |" not in stopped.stdout
    capsys.readouterr()
    assert main(["resume", str(out)]) == 0
    text = capsys.readouterr().out
    assert done == 5 or "continuing" in text and f"phase {done}" in text
    assert_same_run(out, uninterrupted)


@pytest.mark.slow
def test_resume_of_finished_run_changes_nothing(uninterrupted):
    """Training it again in Python changes no log."""
    files = {p: p.read_bytes() for p in uninterrupted.rglob("*") if p.is_file()}
    assert main(["resume", str(uninterrupted)]) == 0
    assert {p: p.read_bytes() for p in uninterrupted.rglob("*") if p.is_file()} == files
    RLHFTrainer.resume(uninterrupted).train()
    logs = [path for path in files if path.suffix in (".json", ".jsonl")]
    assert [path.read_bytes() for path in logs] == [files[path] for path in logs]


@pytest.mark.slow
def test_resume_writes_nothing_before_the_first_phase(make_trainer):
    trainer = make_trainer(total_phases=4, save_every=2)
    for _ in range(3):
        trainer.run_phase()
    trainer.recorder.writer.wait()
    files = {p: p.read_bytes() for p in trainer.run.path.rglob("*") if p.is_file()}
    assert RLHFTrainer.resume(trainer.run.path).phase == 2
    assert {p: p.read_bytes() for p in trainer.run.path.rglob("*") if p.is_file()} == files
