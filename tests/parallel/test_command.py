"""The command line on several processes: refusals said once, a process that dies, and resume."""

import json
import signal
import subprocess
import sys
from time import time

import pytest

from rlhf_lab.training import RunDir

pytestmark = pytest.mark.process

CALL = """
from rlhf_lab.__main__ import main
{before}
sys.exit(main({arguments!r}))
"""
SMALL = [
    "--device",
    "cpu",
    "--batch-size",
    "16",
    "--num-minibatches",
    "2",
    "--base-lr",
    "3e-3",
    "--save-every",
    "1",
]


def call(*arguments: str, before: str = "") -> str:
    return CALL.format(arguments=list(arguments), before=before)


DIES = """
import signal
import rlhf_lab.training.trainer as t
phase = t.RLHFTrainer.run_phase
def dying(self):
    if rank == {rank} and self.phase == 2:
        {how}
    return phase(self)
t.RLHFTrainer.run_phase = dying
"""


def reports(path) -> list[dict]:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").open()]
    kept = ("phase", "mean_reward", "kl_per_sequence", "grad_norm", "objective")
    return [{name: line[name] for name in kept} for line in lines]


def close(one: list[dict], other: list[dict]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a[k] == pytest.approx(b[k], abs=2e-5) for a, b in pairs for k in a)


def test_a_process_that_is_killed_ends_the_run_which_goes_on_in_another_number(ranks, tmp_path):
    """Killed in phase 2 of 4: one sentence with the command, then 2 -> 1 -> 4 processes, of which
    two and four have shards of the weights, and the one has them whole."""
    train = ["train", *SMALL, "--parallel", "fsdp", "--total-phases", "4"]
    train += ["--out", str(tmp_path / "run")]
    whole = ["auto" if x == "fsdp" else x for x in train[:-1]] + [str(tmp_path / "whole")]
    assert ranks(1, call(*whole), "alone")[0].status == 0
    killed = DIES.format(rank=1, how="os.kill(os.getpid(), signal.SIGKILL)")
    first, second = ranks(2, call(*train, before=killed), "killed")
    assert (first.status, second.status) == (75, -signal.SIGKILL)
    told = [line for line in first.error.splitlines() if line.startswith("rlhf_lab: process 0")]
    assert len(told) == 1 and "lost another process in phase 2" in told[0]
    assert f"torchrun ... -m rlhf_lab resume {tmp_path / 'run'}" in told[0]
    assert "Traceback" not in first.error
    run = RunDir.open(tmp_path / "run")
    resume = ["resume", str(run.path)]
    stop = "import rlhf_lab.training.trainer as t\nphase = t.RLHFTrainer.run_phase\n"
    stop += "def one(self):\n    found = phase(self)\n    self.request_stop()\n    return found\n"
    before = stop + "t.RLHFTrainer.run_phase = one"
    (refused,) = ranks(1, call(*resume), "refused")
    assert refused.status == 2 and "parallel='fsdp' requires several processes" in refused.error
    (alone,) = ranks(1, call(*resume, "--parallel", "auto", before=before), "one")
    assert alone.status == 130, alone.error
    four = ranks(4, call(*resume, "--parallel", "fsdp"), "four")
    assert [ended.status for ended in four] == [0] * 4, four[0].error
    assert run.read_info()["status"] == "finished"
    assert close(reports(tmp_path / "whole"), reports(run.path))


KILLED = """
import signal
import rlhf_lab.training.optimization as a
step, taken = a.PolicyUpdate.step, []
def dying(self):
    step(self)
    taken.append(self)
    if rank in {lost} and len(taken) == 7:
        (place / f"died-{{rank}}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
a.PolicyUpdate.step = dying
"""


@pytest.mark.parametrize(
    ("n", "lost", "parallel", "is_torchrun"),
    [(3, [2], "ddp", True), (4, [0, 3], "fsdp", True), (2, [0], "ddp", False)],
)
def test_each_remaining_process_reports_a_lost_one(ranks, tmp_path, n, lost, parallel, is_torchrun):
    """Killed while learning from phase 1 of 3: within 20 s one line each, and the run resumes."""
    place = tmp_path / "killed"
    place.mkdir()
    batch = ["--device", "cpu", "--batch-size", "24", "--num-minibatches", "2", "--save-every", "1"]
    train = ["train", *batch, "--base-lr", "3e-3", "--total-phases", "3", "--parallel", parallel]
    before = f"os.chdir({str(place)!r})\n{KILLED.format(lost=lost)}"
    ended = ranks(n, call(*train, before=before), "killed", is_torchrun)
    assert time() - (place / f"died-{lost[0]}").stat().st_mtime < 20
    assert [one.status for one in ended] == [-9 if i in lost else 75 for i in range(n)]
    for one in (one for i, one in enumerate(ended) if i not in lost):
        (line,) = [line for line in one.error.splitlines() if line.startswith("rlhf_lab: ")]
        assert "lost another process in phase 1" in line and "Traceback" not in one.error
        assert "-m rlhf_lab resume runs/reel-seed1" in line
    run = place / "runs/reel-seed1"
    (alone,) = ranks(1, call("resume", str(run), "--parallel", "auto"), "one")
    assert alone.status == 0, alone.error
    assert RunDir.open(run).read_info()["status"] == "finished"


def test_an_error_of_one_process_is_said_by_it_and_by_the_main_one(ranks, tmp_path):
    before = DIES.format(
        rank=1, how="self.rewards.reward_fn = lambda texts: torch.full([8], torch.nan)"
    )
    train = ["train", *SMALL, "--total-phases", "4", "--out", str(tmp_path / "run")]
    first, second = ranks(2, call(*train, before=before))
    assert (first.status, second.status) == (2, 2)
    assert "process 1 failed while scoring its samples" in first.error
    said = second.error.strip().splitlines()
    assert len(said) == 1 and said[0].startswith("rlhf_lab: process 1: reward_fn"), said


def test_a_refusal_is_said_once(ranks, tmp_path):
    train = [
        "train",
        "--device",
        "cpu",
        "--batch-size",
        "30",
        "--num-minibatches",
        "2",
        "--out",
        str(tmp_path / "run"),
    ]
    first, second = ranks(4, call(*train))[:2]
    assert (first.status, second.status) == (2, 2)
    assert first.error.strip() == (
        "rlhf_lab: batch_size=30 and its minibatches of 15 sequences must be divisible by 4 "
        "processes. Change batch_size or num_minibatches, or start another number of processes."
    )
    assert second.error == "" and not (tmp_path / "run").exists()


FSDP = ("--parallel", "fsdp")
REFUSED = {
    "batch_size=6 and its minibatches of 3": ("--batch-size", "6"),
    "micro_batch_size=4 must divide the 6": ("--batch-size", "24", "--micro-batch-size", "4"),
    "optimizer_in_backward=True steps before": (
        *("--optimizer-in-backward", "--max-grad-norm", "None"),
    ),
    "cannot be combined with optimizer='adamw_8bit'": (*FSDP, "--optimizer", "adamw_8bit"),
    "cannot be combined with weight_precision='bf16'": (*FSDP, "--weight-precision", "bf16"),
    "Set activation_checkpointing=True, or parallel='ddp'": (*FSDP, "--precision", "bf16"),
    "This machine has 1 GPUs": ("--device", "cuda"),
    "device='cuda:0' names one device for 2 processes": ("--device", "cuda:0"),
}


def test_each_refusal_is_said_by_the_main_process_alone(ranks, tmp_path):
    """One run after the other in the same two processes; then one whose seeds differ."""
    start = [
        "train",
        "--batch-size",
        "16",
        "--num-minibatches",
        "2",
        "--out",
        str(tmp_path / "run"),
    ]
    commands = [
        [*start, *asked, *([] if "--device" in asked else ["--device", "cpu"])]
        for asked in REFUSED.values()
    ]
    code = (
        "from unittest import mock\n"
        "from rlhf_lab.__main__ import main\n"
        "with mock.patch.multiple(torch.cuda, is_available=lambda: True, device_count=lambda: 1):\n"
        f"    tell(statuses=[main(command) for command in {commands!r}])\n"
        f"sys.exit(main([*{start!r}, '--device', 'cpu', '--seed', str(rank)]))"
    )
    first, second = ranks(2, code)
    for ended in (first, second):
        assert ended.told["statuses"] == [2] * len(REFUSED) and ended.status == 2
    *said, unequal = first.error.strip().splitlines()
    for line, part in zip(said, REFUSED, strict=True):
        assert line.startswith("rlhf_lab: ") and part in line, line
    assert unequal.startswith("rlhf_lab: process 1 failed while comparing itself with process 0")
    (own,) = second.error.strip().splitlines()
    assert own.startswith("rlhf_lab: process 1: Process 1 and process 0 differ in: settings")
    assert not (tmp_path / "run").exists()


def test_torchrun_trains_with_all_default_probes(tmp_path):
    """The whole command, as a user gives it; listeners, probes and saving on the main process."""
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
    ]
    train = ["-m", "rlhf_lab", "train", *SMALL, "--total-phases", "2", "--probes"]
    out = tmp_path / "run"
    done = subprocess.run(
        [*launch, *train, "--out", str(out)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loading reel-nano") == 1
    info = RunDir.open(out).read_info()
    assert info["status"] == "finished" and info["processes"] == 2
    checks = [json.loads(line) for line in (out / "probes/checks.jsonl").open()]
    assert len(checks) > 30 and all(check["ok"] for check in checks)
    recorded = {path.stem for path in (out / "probes/records").glob("*.jsonl")}
    assert len(recorded) == 8
