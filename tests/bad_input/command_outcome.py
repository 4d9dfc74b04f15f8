"""The outcome of a command that is run in this process, and what is wrong with it.

Bad input must end with status 2, one message that names the problem, and every file unchanged.
"""

import contextlib
import dataclasses
import hashlib
import io
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_lab.__main__ import main
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import LabError

SMALL = "--total-phases 1 --batch-size 16 --num-minibatches 2 --warmup-steps 0 --gen-len 8"
TRAIN = ["train", *SMALL.split()]  # a run of a second
TIME_LIMIT = 60  # seconds after which a command counts as hanging
NOT_ERRORS = ("Loading weights", "Map:", "rlhf_lab: warning:")  # beginnings of other lines


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Exit status and output of a command."""

    status: int
    out: str
    err: str

    @property
    def messages(self) -> list[str]:
        """Lines on standard error, without warnings and progress bars."""
        return [line for line in self.err.splitlines() if line and not line.startswith(NOT_ERRORS)]


def run(arguments: list[Any]) -> Outcome:
    """Run a command of `python -m rlhf_lab` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _time_limit():
        with warnings.catch_warnings():
            warnings.simplefilter("default")  # under `pytest -W ignore`, too
            try:
                status = main([str(argument) for argument in arguments])
            except SystemExit as stop:  # tyro's panel
                status = stop.code
    return Outcome(status, out.getvalue(), err.getvalue())


def rejected(arguments: list[Any], *words: str) -> Outcome:
    """Run a command that must fail with one message that contains these words."""
    outcome = run(arguments)
    assert outcome.status == 2 and len(outcome.messages) == 1, (outcome.status, outcome.err[:600])
    check_message(outcome.messages[0], words)
    return outcome


def check_message(message: str, words: tuple[str, ...]) -> None:
    """Check that a message is one line that contains these words."""
    missing = [word for word in words if word not in message]
    assert not missing and "\n" not in message and message.endswith((".", ")")), (missing, message)


def accepted(arguments: list[Any]) -> Outcome:
    """Run a command that must end with status 0."""
    outcome = run(arguments)
    assert outcome.status == 0, outcome.err
    return outcome


def settings(**changes: Any) -> RLHFArgs:
    """Return the settings of two small phases."""
    small = {"total_phases": 2, "batch_size": 16, "num_minibatches": 2, "gen_len": 8}
    return RLHFArgs(**({"preset": "reel", "warmup_steps": 0} | small | changes))


def refuses(function: Callable[[], Any], *words: str) -> str:
    """Check that a function raises a LabError of one line with these words; return it."""
    with pytest.raises(LabError) as caught:
        function()
    check_message(str(caught.value), words)
    return str(caught.value)


@contextlib.contextmanager
def untouched(*directories: Path) -> Iterator[None]:
    """Check that no file below these directories is changed, created or removed."""
    before = [contents(directory) for directory in directories]
    yield
    assert [contents(directory) for directory in directories] == before


def contents(directory: Path) -> dict[str, str]:
    """Return kind and digest, or target, of everything below a directory."""
    return {str(path.relative_to(directory)): _state(path) for path in directory.rglob("*")}


def _state(path: Path) -> str:
    if path.is_symlink():
        return f"-> {path.readlink()}"
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return "directory" if path.is_dir() else "special"


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    fail = lambda *_: pytest.fail(f"no end after {TIME_LIMIT} s")  # a BaseException
    earlier = signal.signal(signal.SIGALRM, fail)
    signal.alarm(TIME_LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, earlier)
