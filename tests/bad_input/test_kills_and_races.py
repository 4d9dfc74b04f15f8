"""Competing trainers of one run; training/test_resume.py has killed ones."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bad_input.command_outcome import accepted, rejected
from tests.training.recorded_runs import assert_same_run
from tests.warm import WarmPython

pytestmark = [pytest.mark.process, pytest.mark.slow]
TRAIN = (
    "--preset reel --total-phases 4 --batch-size 8 --num-minibatches 2 --warmup-steps 1 "
    "--gen-len 8 --kl-controller adaptive --kl-target 0.05 --kl-horizon 50"
).split()
PAUSED = """
import sys, time
from pathlib import Path

import rlhf_lab.training.trainer
from rlhf_lab.__main__ import main
from rlhf_lab.training import RLHFTrainer

event, phase, here = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])


class Paused(RLHFTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if event != "start":
            self.on(event)(lambda ctx: wait() if ctx.phase == phase else None)

    def start(self):
        if event == "start" and not self._started:
            wait()
        super().start()


def wait():
    (here / "paused").touch()
    while not (here / "go").exists():
        time.sleep(0.01)


rlhf_lab.training.trainer.RLHFTrainer = Paused
sys.exit(main(sys.argv[4:]))
"""


class Held:
    """A command in a process that waits at a moment until `end`."""

    def __init__(self, python: WarmPython, home: Path, moment: str, arguments: list[Any]) -> None:
        self.home = home
        home.mkdir()
        self.files = [open(home / name, "w+") for name in ("in", "out", "err")]
        command = ["-c", PAUSED, *moment.split(), home, *arguments]
        descriptors = tuple(file.fileno() for file in self.files)
        self.process = python.start([str(part) for part in command], descriptors)
        deadline = time.monotonic() + 120
        while not (home / "paused").exists():
            assert time.monotonic() < deadline, (home / "err").read_text()
            time.sleep(0.01)

    def end(self) -> tuple[int, str]:
        """Continue to the end; return status and standard error."""
        (self.home / "go").touch()
        return self.process.wait(), (self.home / "err").read_text()


@pytest.fixture
def held(warm_python: WarmPython, tmp_path: Path) -> Iterator[Callable[..., Held]]:
    commands: list[Held] = []

    def start(moment: str, *arguments: Any) -> Held:
        home = tmp_path / f"held{len(commands)}"
        commands.append(Held(warm_python, home, moment, list(arguments)))
        return commands[-1]

    yield start
    for command in commands:
        (command.home / "go").touch()
        for file in command.files:
            file.close()


@pytest.fixture(scope="module")
def whole(warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without another process."""
    out = tmp_path_factory.mktemp("races") / "whole"
    done = warm_python.run(["-m", "rlhf_lab", *train(out)])
    assert done.returncode == 0, done.stderr
    return out


def train(out: Path) -> list[Any]:
    return ["train", *TRAIN, "--out", str(out)]


@pytest.mark.parametrize(
    "moment", [pytest.param("after_rollout 0", marks=pytest.mark.nightly), "after_step 2"]
)
def test_run_in_progress_is_read_but_not_resumed(held, whole, tmp_path, monkeypatch, moment):
    monkeypatch.chdir(tmp_path)
    first = held(moment, *train(tmp_path / "RUN"))
    rejected(["resume", "RUN"], "is being trained by another process")
    if moment == "after_step 2":
        for command in ("report RUN --out page.html", "sample RUN -n 2", "export RUN m"):
            accepted(command.split())
    assert first.end()[0] == 0
    assert_same_run(tmp_path / "RUN", whole)


@pytest.mark.nightly
@pytest.mark.parametrize("is_finished", [False, True])
def test_late_trainer_rejects_another_run(held, whole, tmp_path, is_finished) -> None:
    command = train(tmp_path / "RUN")
    late = held("start 0", *command)
    first = None if is_finished else held("after_rollout 1", *command)
    if is_finished:
        accepted(command)
    status, err = late.end()
    assert status == 2 and ("already holds a run" in err or "is being trained by another" in err)
    assert is_finished or first.end()[0] == 0
    assert_same_run(tmp_path / "RUN", whole)


@pytest.mark.nightly
@pytest.mark.parametrize("is_finished", [False, True])
def test_late_resume_rejects_a_run_that_was_continued(held, whole, tmp_path, is_finished) -> None:
    stopped = held("after_rollout 1", *train(tmp_path / "RUN"))
    os.kill(stopped.process.pid, signal.SIGTERM)
    assert stopped.end()[0] == 128 + 15
    late = held("start 0", "resume", tmp_path / "RUN")
    first = None if is_finished else held("after_rollout 3", "resume", tmp_path / "RUN")
    if is_finished:
        accepted(["resume", tmp_path / "RUN"])
    status, err = late.end()
    words = "another trainer has continued the run" if is_finished else "is being trained by"
    assert status == 2 and words in err
    assert is_finished or first.end()[0] == 0
    assert_same_run(tmp_path / "RUN", whole)
