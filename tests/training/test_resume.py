"""Runs that are killed at exact points, as real processes, and resumed from the command line."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.run_lock import LOCK
from tests.warm import WarmPython

RUN = {
    "preset": "reel",
    "total_phases": 5,
    "batch_size": 8,
    "num_minibatches": 2,
    "warmup_steps": 1,
    "gen_len": 8,
    "top_k": 12,
}

# where to kill: at the count-th call of an event in a phase, or half-way through a write
POINTS: dict[str, dict[str, Any]] = {
    "before_the_first_checkpoint": {"event": "run_start", "phase": 0},
    "rollout_half_of_phase_0": {"event": "after_rollout", "phase": 0},
    "rollout_half_of_phase_3": {"event": "after_score", "phase": 3},
    "first_step_of_phase_0": {"event": "after_step", "phase": 0},
    "learning_half_of_phase_2": {"event": "after_backward", "phase": 2, "count": 3},
    "between_metrics_and_checkpoint": {"event": "after_phase", "phase": 1},
    "during_a_checkpoint_write": {"write": "last", "phase": 3},
    "during_the_write_of_run_json": {"write": "run.json", "phase": 0},
    "during_a_line_of_metrics": {"write": "metrics.jsonl", "phase": 2},
    "between_the_last_phase_and_the_end": {"event": "checkpoint", "phase": 5},
    "far_from_the_last_save": {"event": "after_loss", "phase": 4, "args": {"save_every": 3}},
    "before_the_first_of_rare_saves": {
        "event": "after_step",
        "phase": 2,
        "args": {"save_every": 3},
    },
}

DRIVER = """
import json, os, signal, sys
from pathlib import Path

from rlhf_lab.config import RLHFArgs
from rlhf_lab.training import RLHFTrainer, RunDir, checkpoint


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_event(trainer, point):
    left = [point.get("count", 1)]

    def count_down(ctx):
        if ctx.phase == point["phase"]:
            left[0] -= 1
            if left[0] == 0:
                die()

    trainer.on(point["event"])(count_down)


def die_in_write(trainer, point):
    save_file, write_info, append = checkpoint.save_file, RunDir.write_info, RunDir.append

    def half_save(tensors, path, metadata):
        save_file(tensors, path, metadata=metadata)
        if point["write"] in str(path) and trainer.phase == point["phase"]:
            os.truncate(path, os.path.getsize(path) // 2)
            die()

    def half_info(run, info):
        if point["write"] == "run.json" and "initial" in info:
            Path(run.path, ".run.json.partial").write_text(json.dumps(info)[:40])
            die()
        write_info(run, info)

    def half_append(run, file, records):
        if point["write"] == file and trainer.phase == point["phase"]:
            with open(run.path / file, "a") as out:
                out.write(json.dumps(records[0])[:50])
            die()
        append(run, file, records)

    checkpoint.save_file, RunDir.write_info, RunDir.append = half_save, half_info, half_append


job = json.loads(sys.argv[1])
trainer = RLHFTrainer(RLHFArgs(**job["args"]), out=job["out"])
(die_at_event if "event" in job["point"] else die_in_write)(trainer, job["point"])
trainer.train()
"""

INTERRUPTED = """
import os, signal, sys

import rlhf_lab.training
from rlhf_lab.__main__ import main
from rlhf_lab.training import RLHFTrainer

event, phase, names = sys.argv[1], int(sys.argv[2]), sys.argv[3].split()
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored


class Interrupted(RLHFTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)

        @self.on(event)
        def press(ctx):
            if ctx.phase == phase:
                for name in names:
                    os.kill(os.getpid(), getattr(signal, name))


rlhf_lab.training.RLHFTrainer = Interrupted
sys.exit(main(sys.argv[4:]))
"""


def flags(**overrides: Any) -> list[str]:
    """The run's arguments as the command line takes them."""
    pairs = (RUN | overrides).items()
    return [part for name, value in pairs for part in (f"--{name.replace('_', '-')}", str(value))]


def train(out: Path) -> list[str]:
    return ["-m", "rlhf_lab", "train", *flags(), "--out", str(out)]


def kill_after_the_first_line(out: Path, env: dict[str, str]) -> int:
    """SIGKILL the real command line as soon as a phase was logged; returns its status."""
    process = subprocess.Popen(
        [sys.executable, *train(out)],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 600
    while not (out / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    return process.wait()


@pytest.fixture(scope="module")
def resume(warm_python: WarmPython) -> Callable[[Path], subprocess.CompletedProcess[str]]:
    """Runs `python -m rlhf_lab resume` on a run."""
    return lambda out: warm_python.run(["-m", "rlhf_lab", "resume", str(out)])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, warm_python) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    done = warm_python.run(train(out))
    assert done.returncode == 0, done.stderr
    return out


class Resumed(NamedTuple):
    """A stopped run, the status or process of the stop, and the `resume` process."""

    out: Path
    stopped: int | subprocess.CompletedProcess[str]
    process: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def killed_and_resumed(
    tmp_path_factory, warm_python, cold_python, resume, surroundings
) -> dict[str, Resumed]:
    """All runs, stopped and resumed; one of them from the shell."""
    home = tmp_path_factory.mktemp("killed")

    def kill(name: str) -> int:
        point = POINTS[name]
        job = {"out": str(home / name), "args": RUN | point.get("args", {}), "point": point}
        return warm_python.run(["-c", DRIVER, json.dumps(job)]).returncode

    def interrupt(name: str, *press: str) -> subprocess.CompletedProcess[str]:
        return warm_python.run(["-c", INTERRUPTED, *press, *train(home / name)[2:]])

    stopped = {name: kill(name) for name in POINTS} | {
        "ctrl_c": interrupt("ctrl_c", "after_rollout", "2", "SIGINT"),
        "ctrl_c_twice": interrupt("ctrl_c_twice", "after_backward", "2", "SIGINT SIGINT"),
        "ctrl_c_at_the_end": interrupt("ctrl_c_at_the_end", "after_rollout", "4", "SIGINT"),
        "terminated": interrupt("terminated", "after_rollout", "2", "SIGTERM"),
        "hung_up": interrupt("hung_up", "after_backward", "2", "SIGHUP SIGHUP"),
    }
    done = {name: Resumed(home / name, how, resume(home / name)) for name, how in stopped.items()}
    out = home / "killed_by_time"
    status = kill_after_the_first_line(out, surroundings)
    again = cold_python(["-m", "rlhf_lab", "resume", str(out)])
    return done | {"killed_by_time": Resumed(out, status, again)}


def logged(out: Path) -> list[dict[str, Any]]:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "cost"} for line in lines]


def assert_same_run(found: Path, expected: Path) -> None:
    """Compare weights, optimizer, metrics and samples bitwise."""
    for name in ("last", "best", "phase_000001", "phase_000004"):
        a, b = (load_file(p / "checkpoints" / f"{name}.safetensors") for p in (found, expected))
        assert a.keys() == b.keys()
        different = [key for key in a if not torch.equal(a[key], b[key])]
        assert not different, f"{name}: {different[:3]}"
    assert logged(found) == logged(expected)
    assert (found / "samples.jsonl").read_bytes() == (expected / "samples.jsonl").read_bytes()
    info, whole = (json.loads((p / "run.json").read_text()) for p in (found, expected))
    assert info["status"] == "finished" and info["final"] == whole["final"]
    assert info["phases_done"] == 5
    assert not list(found.rglob("*.partial")) and not (found / LOCK).exists()


KILLED = [*POINTS, "killed_by_time"]


@pytest.mark.parametrize("name", KILLED)
def test_killed_run_equals_uninterrupted_run(killed_and_resumed, uninterrupted, name):
    resumed = killed_and_resumed[name]
    assert resumed.stopped == -signal.SIGKILL
    assert resumed.process.returncode == 0, resumed.process.stderr
    assert "Traceback" not in resumed.process.stderr
    assert_same_run(resumed.out, uninterrupted)


def test_ctrl_c_finishes_the_phase_and_saves(killed_and_resumed, uninterrupted):
    resumed = killed_and_resumed["ctrl_c"]
    stopped = resumed.stopped
    assert stopped.returncode == 130
    assert f"stopped after 3 of 5 phases; go on with: python -m rlhf_lab resume {resumed.out}" in (
        stopped.stdout
    )
    assert "finishing this phase" in stopped.stdout
    assert "phase 2 |" in stopped.stdout and "phase 3 |" not in stopped.stdout
    assert "Traceback" not in stopped.stderr
    assert "continuing" in resumed.process.stdout and "phase 3" in resumed.process.stdout
    assert resumed.process.returncode == 0
    assert_same_run(resumed.out, uninterrupted)


@pytest.mark.parametrize(("name", "status"), [("terminated", 128 + 15), ("hung_up", 128 + 1)])
def test_sigterm_and_sighup_finish_the_phase_and_save(
    killed_and_resumed, uninterrupted, name, status
):
    resumed = killed_and_resumed[name]
    assert resumed.stopped.returncode == status
    assert (
        "stopped after 3 of 5 phases; go on with: python -m rlhf_lab resume"
        in resumed.stopped.stdout
    )
    assert "Traceback" not in resumed.stopped.stderr
    assert "continuing" in resumed.process.stdout and "phase 3" in resumed.process.stdout
    assert_same_run(resumed.out, uninterrupted)


def test_second_ctrl_c_stops_at_once_and_loses_one_phase(killed_and_resumed, uninterrupted):
    resumed = killed_and_resumed["ctrl_c_twice"]
    stopped = resumed.stopped
    assert stopped.returncode == 130
    assert "stopped after 2 of 5 phases; go on with: python -m rlhf_lab resume" in stopped.stdout
    assert "phase 2 |" not in stopped.stdout
    assert "Traceback" not in stopped.stderr
    assert resumed.process.returncode == 0
    assert_same_run(resumed.out, uninterrupted)


def test_ctrl_c_in_the_last_phase_ends_without_traceback(killed_and_resumed, uninterrupted):
    resumed = killed_and_resumed["ctrl_c_at_the_end"]
    assert "Traceback" not in resumed.stopped.stderr
    assert resumed.stopped.returncode in (0, 130)
    assert resumed.process.returncode == 0, resumed.process.stderr
    assert_same_run(resumed.out, uninterrupted)


def test_resume_of_finished_run_changes_nothing(uninterrupted, resume):
    files = {p: p.read_bytes() for p in uninterrupted.rglob("*") if p.is_file()}
    done = resume(uninterrupted)
    assert done.returncode == 0
    left = "nothing is left to do (--total-phases N makes it longer)."
    assert done.stdout == f"{uninterrupted} is finished; {left}\n"
    assert {p: p.read_bytes() for p in uninterrupted.rglob("*") if p.is_file()} == files


def first_phases(trainer: RLHFTrainer, phases: int) -> Path:
    for _ in range(phases):
        trainer.run_phase()
    trainer.recorder.writer.wait()
    return trainer.run.path


@pytest.mark.slow
def test_resumed_trainer_has_optimizer_schedule_and_best(make_trainer, copy_parameters):
    trainer = make_trainer(total_phases=4)
    again = RLHFTrainer.resume(first_phases(trainer, 2))
    assert (again.phase, again.args) == (2, trainer.args)
    assert again.recorder.best == trainer.recorder.best
    assert again.scheduler.get_last_lr() == trainer.scheduler.get_last_lr()
    assert [g["lr"] for g in again.optimizer.param_groups] == trainer.scheduler.get_last_lr()
    ours, theirs = copy_parameters(again.policy), copy_parameters(trainer.policy)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for mine, other in zip(again.policy.parameters(), trainer.policy.parameters(), strict=True):
        state, expected = again.optimizer.state[mine], trainer.optimizer.state[other]
        assert state.keys() == expected.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(state[key], expected[key]) for key in expected)


@pytest.mark.slow
def test_finished_run_trained_again_in_python_is_unchanged(make_trainer):
    trainer = make_trainer(total_phases=1, warmup_steps=0)
    trainer.train()
    path = trainer.run.path
    files = {name: (path / name).read_bytes() for name in ("run.json", "samples.jsonl")}
    RLHFTrainer.resume(path).train()
    assert {name: (path / name).read_bytes() for name in files} == files
    assert json.loads(files["run.json"])["status"] == "finished"
    assert [line["phase"] for line in trainer.run.read("samples.jsonl")] == [0] * 8 + [1] * 8


@pytest.mark.slow
def test_resume_writes_nothing_before_the_first_phase(make_trainer):
    path = first_phases(make_trainer(total_phases=4, save_every=2), 3)
    files = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    assert RLHFTrainer.resume(path).phase == 2
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == files
