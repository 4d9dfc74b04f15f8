"""Runs that two trainers want, and runs that are moved while they are trained."""

import os
import shutil
import time
from pathlib import Path

import pytest

from rlhf_lab import RLHFTrainer
from tests.bad_input.command_outcome import TRAIN, accepted, refuses, rejected, settings

pytestmark = pytest.mark.usefixtures("no_type_checks")
HOLD = """
import time
from pathlib import Path
from rlhf_lab.training.run_dir import RunLock

lock = RunLock()
lock.hold(Path("RUN"))
Path("held").touch()
start = time.monotonic()
while not Path("go").exists() and time.monotonic() < start + 120:
    time.sleep(0.01)
"""


def test_run_in_progress_is_read_but_not_resumed(here: Path, warm_python) -> None:
    """training/test_resume.py kills a process that trains."""
    with open(os.devnull, "r+") as nothing:
        process = warm_python.start(["-c", HOLD], (nothing.fileno(),) * 3)
    deadline = time.monotonic() + 120
    while not Path("held").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    rejected(["resume", "RUN"], "is being trained by another process")
    for command in ("report RUN --out page.html", "sample RUN -n 2", "export RUN model"):
        accepted(command.split())
    Path("go").touch()
    assert process.wait() == 0
    accepted(["resume", "RUN"])


def test_late_trainer_rejects_a_run_that_another_trained(here: Path) -> None:
    """training/test_step.py has one that resumes too late."""
    late = RLHFTrainer(settings(), out="made")
    accepted([*TRAIN, "--out", "made"])
    refuses(late.train, "already holds a run")


@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_run_deleted_or_moved_during_training_raises(here: Path, how: str) -> None:
    trainer = RLHFTrainer(settings(total_phases=4), out="made")
    trainer.run_phase()
    trainer.run_phase()
    if how == "deleted":
        while Path("made").exists():  # the newest checkpoint may still be written
            shutil.rmtree("made", ignore_errors=True)
    else:
        Path("made").rename("moved")
    refuses(trainer.train, "made")
