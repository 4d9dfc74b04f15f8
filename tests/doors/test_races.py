"""Two commands at one run: the second trainer is refused, a reader reads, and the first goes on."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doors.door import accepted, refused
from tests.doors.killing import TRAIN, is_equal
from tests.warm import WarmProcess, WarmPython

pytestmark = [pytest.mark.process, pytest.mark.slow]
PAUSED = """
import sys, time
from pathlib import Path

import rlhf_lab.training
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


rlhf_lab.training.RLHFTrainer = Paused
sys.exit(main(sys.argv[4:]))
"""


class Held:
    """A command in a process that waits at a moment until it is let go."""

    def __init__(self, python: WarmPython, home: Path, moment: str, arguments: list[Any]) -> None:
        self.home = home
        home.mkdir()
        self.files = [open(home / name, "w+") for name in ("in", "out", "err")]
        command = ["-c", PAUSED, *moment.split(), home, *arguments]
        self.process: WarmProcess = python.start(
            [str(part) for part in command], tuple(file.fileno() for file in self.files)
        )
        deadline = time.monotonic() + 120
        while not (home / "paused").exists():
            assert time.monotonic() < deadline, (home / "err").read_text()
            time.sleep(0.01)

    def end(self) -> tuple[int, str]:
        """Let it go; its status, and what it said on standard error."""
        (self.home / "go").touch()
        status = self.process.wait()
        return status, (self.home / "err").read_text()


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
    """The run that nobody else came to."""
    out = tmp_path_factory.mktemp("races") / "whole"
    done = warm_python.run(["-m", "rlhf_lab", "train", *TRAIN, "--out", str(out)])
    assert done.returncode == 0, done.stderr
    return out


def train(out: Path) -> list[Any]:
    return ["train", *TRAIN, "--out", out]


@pytest.mark.parametrize("moment", ["after_rollout 0", "after_rollout 2", "after_step 1"])
@pytest.mark.parametrize("changes", [[], ["--total-phases", 9]], ids=["plain", "changed"])
def test_resume_of_a_run_in_progress(held, whole, tmp_path, moment, changes) -> None:
    first = held(moment, *train(tmp_path / "RUN"))
    refused(["resume", tmp_path / "RUN", *changes], "is being trained by another process")
    assert first.end()[0] == 0 and is_equal(tmp_path / "RUN", whole)


@pytest.mark.parametrize(
    "reader", ["report RUN --out page.html", "sample RUN -n 2", "export RUN m"]
)
def test_a_reader_of_a_run_in_progress(held, whole, tmp_path, monkeypatch, reader) -> None:
    monkeypatch.chdir(tmp_path)
    first = held("after_step 2", *train(tmp_path / "RUN"))
    accepted(reader.split())
    assert first.end()[0] == 0 and is_equal(tmp_path / "RUN", whole)


def test_a_trainer_at_a_place_that_is_taken_meanwhile(held, whole, tmp_path) -> None:
    """Both have looked when nothing was there; the run of the quicker one stays."""
    late = held("start 0", *train(tmp_path / "RUN"))
    accepted(train(tmp_path / "RUN"))
    status, said = late.end()
    assert status == 2 and "already holds a run" in said
    assert is_equal(tmp_path / "RUN", whole)


def test_a_trainer_at_a_place_where_another_is_at_work(held, whole, tmp_path) -> None:
    late = held("start 0", *train(tmp_path / "RUN"))
    first = held("after_rollout 1", *train(tmp_path / "RUN"))
    status, said = late.end()
    assert status == 2 and (
        "already holds a run" in said or "is being trained by another process" in said
    )
    assert first.end()[0] == 0 and is_equal(tmp_path / "RUN", whole)


def test_a_resume_that_was_loaded_before_another_went_on(
    held, whole, tmp_path, warm_python
) -> None:
    stopped = held("after_rollout 1", *train(tmp_path / "RUN"))
    os.kill(stopped.process.pid, signal.SIGTERM)
    assert stopped.end()[0] == 128 + 15
    late = held("start 0", "resume", tmp_path / "RUN")
    first = held("after_rollout 3", "resume", tmp_path / "RUN")
    status, said = late.end()
    assert status == 2 and "is being trained by another process" in said
    assert first.end()[0] == 0 and is_equal(tmp_path / "RUN", whole)


def test_a_resume_that_was_loaded_before_another_finished(held, whole, tmp_path) -> None:
    stopped = held("after_rollout 1", *train(tmp_path / "RUN"))
    os.kill(stopped.process.pid, signal.SIGTERM)
    assert stopped.end()[0] == 128 + 15
    late = held("start 0", "resume", tmp_path / "RUN")
    accepted(["resume", tmp_path / "RUN"])
    status, said = late.end()
    assert status == 2 and "another trainer has continued the run" in said
    assert is_equal(tmp_path / "RUN", whole)
