"""The command line on several processes: errors, a process that dies, and resume."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_lab.training import RunDir

pytestmark = pytest.mark.process

TRAIN = "train --device cpu --batch-size 16 --num-minibatches 2 --base-lr 3e-3 --save-every 1"


def call(arguments: str, before: str = "pass") -> str:
    """Return code of the command line, with a statement before each phase."""
    return f"""
import signal
from rlhf_lab.__main__ import main
from rlhf_lab.training.trainer import RLHFTrainer
def run_phase(self, phase=RLHFTrainer.run_phase):
    {before}
    return phase(self)
RLHFTrainer.run_phase = run_phase
sys.exit(main({arguments.split()!r}))
"""


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.open()]


KILL = "if rank == 1 and self.phase == 2: os.kill(os.getpid(), signal.SIGKILL)"
STOP = "self.request_stop()"
NAN = "if rank == 1: self.rewards.reward_fn = lambda texts: torch.full([8], torch.nan)"


@pytest.mark.nightly
def test_killed_run_resumes_with_other_numbers_of_processes(launch, tmp_path):
    """Killed in phase 2 of 4 with 2 processes; 1 continues it for a phase, then 4."""
    run = tmp_path / "run"
    train = f"{TRAIN} --total-phases 4 --out"
    (alone,) = launch(tmp_path / "alone", 1, call(f"{train} {tmp_path / 'whole'}"), False)
    assert alone.status == 0, alone.error
    code = call(f"{train} {run} --parallel fsdp", KILL)
    first, second = launch(tmp_path / "killed", 2, code)
    assert (first.status, second.status) == (75, -signal.SIGKILL)
    (line,) = [x for x in first.error.splitlines() if x.startswith("rlhf_lab: process 0")]
    assert "lost another process in phase 2" in line and "Traceback" not in first.error
    assert f"torchrun ... -m rlhf_lab resume {run}" in line
    (rejected,) = launch(tmp_path / "rejected", 1, call(f"resume {run}"), False)
    assert rejected.status == 2
    assert "parallel='fsdp' requires several processes" in rejected.error
    code = call(f"resume {run} --parallel auto", STOP)
    (one,) = launch(tmp_path / "one", 1, code, False)
    assert one.status == 130, one.error
    four = launch(tmp_path / "four", 4, call(f"resume {run} --parallel fsdp"))
    assert [ended.status for ended in four] == [0] * 4, four[0].error
    assert RunDir.open(run).read_info()["status"] == "finished"
    before, after = lines(tmp_path / "whole/metrics.jsonl"), lines(run / "metrics.jsonl")
    assert len(after) == 4
    for name in ("phase", "mean_reward", "kl_per_sequence", "grad_norm", "objective"):
        expected = [line[name] for line in before]
        assert [line[name] for line in after] == pytest.approx(expected, abs=2e-5)


def test_rank_reports_its_error_and_others_name_it(launch, tmp_path):
    train = f"{TRAIN} --total-phases 2 --out {tmp_path / 'run'}"
    first, second = launch(tmp_path, 2, call(train, NAN))
    assert (first.status, second.status) == (2, 2)
    assert "process 1 failed while scoring its samples" in first.error
    (line,) = second.error.strip().splitlines()
    assert line.startswith("rlhf_lab: process 1: reward_fn")


def test_main_process_reports_rejected_settings_once(launch, tmp_path):
    """Two rejected commands in the same processes; then seeds that differ."""
    train = f"{TRAIN} --out {tmp_path / 'run'}"
    commands = [f"{train} --batch-size 6".split(), f"{train} --device cuda:0".split()]
    code = f"""
from unittest import mock
from rlhf_lab.__main__ import main
with mock.patch.multiple(torch.cuda, is_available=lambda: True, device_count=lambda: 1):
    statuses = [main(command) for command in {commands!r}]
report(statuses=[*statuses, main([*{train.split()!r}, "--seed", str(rank)])])
"""
    first, second = launch(tmp_path, 2, code)
    assert first.values["statuses"] == second.values["statuses"] == [2, 2, 2]
    size, device, unequal = (x for x in first.error.splitlines() if ": warning: " not in x)
    assert size.startswith("rlhf_lab: batch_size=6 and its minibatches of 3 sequences must be")
    assert device.startswith("rlhf_lab: device='cuda:0' names one device for 2 processes.")
    assert unequal.startswith("rlhf_lab: process 1 failed while comparing itself with process 0")
    (line,) = second.error.strip().splitlines()
    assert "Process 1 and process 0 differ in: settings, weights of the policy" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_torchrun_trains_shards_with_the_default_probes(tmp_path):
    out = tmp_path / "run"
    torchrun = "-m torch.distributed.run --nproc-per-node 2 --standalone -m rlhf_lab"
    options = f"--total-phases 1 --warmup-steps 0 --parallel fsdp --probes --out {out}"
    words = f"{torchrun} {TRAIN} {options}".split()
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loading reel-nano") == 1
    info = RunDir.open(out).read_info()
    assert info["status"] == "finished" and info["processes"] == 2
    checks = lines(out / "probes/checks.jsonl")
    recorded = {path.stem for path in (out / "probes/records").glob("*.jsonl")}
    assert len(recorded) == 8 and recorded == {check["probe"] for check in checks}
    assert len(checks) > 10 and all(check["ok"] for check in checks)
