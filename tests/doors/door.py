"""The door of a command, tried in this process: how it ended, and what is wrong with that.

A bad input is answered well where the command returns 2, prints one sentence on standard error that
names what is wrong, and leaves what was there as it was. A good one returns 0. All else is bad: an
exception, a hang, other words, another status, a file that changed.
"""

import contextlib
import dataclasses
import hashlib
import io
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_lab.__main__ import main
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import LabError

SMALL = "--total-phases 1 --batch-size 16 --num-minibatches 2 --warmup-steps 0 --gen-len 8"
TRAIN = ["train", *SMALL.split()]  # a run of a second
PATIENCE = 60
"""Seconds of work after which a command counts as one that hangs."""
PROGRESS = ("Loading weights", "Map:", "rlhf_lab: warning:")
"""What lines on standard error begin with that are no sentence about a mistake."""


class Hang(BaseException):
    """Stops a command that takes longer than `PATIENCE`; no `except Exception` swallows it."""


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a command ended.

    Attributes:
        status: what it returned; None where it raised.
        raised: the exception that it let through.
    """

    status: int | None
    out: str
    err: str
    raised: BaseException | None = None

    @property
    def sentences(self) -> list[str]:
        """The lines on standard error, without warnings and bars of progress."""
        return [line for line in self.err.splitlines() if line and not line.startswith(PROGRESS)]


def run(arguments: list[Any]) -> Ending:
    """Run a command of `python -m rlhf_lab` in this process."""
    out, err = io.StringIO(), io.StringIO()
    status, raised = None, None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _patience():
        try:
            status = main([str(argument) for argument in arguments])
        except BaseException as error:
            raised = error
    if isinstance(raised, KeyboardInterrupt):
        raise raised
    return Ending(status, out.getvalue(), err.getvalue(), raised)


def why_bad(ending: Ending, *words: str) -> str | None:
    """What is wrong with how a bad input was answered; None where nothing is.

    Args:
        words: what the sentence must name.
    """
    if ending.raised is not None:
        return f"{type(ending.raised).__name__}: {ending.raised!s:.300}"
    if ending.status != 2 or len(ending.sentences) != 1:
        return f"status {ending.status}, {ending.sentences!a:.600}"
    sentence = ending.sentences[0]
    lacking = [word for word in words if word not in sentence]
    if lacking or not sentence.endswith((".", ")")):
        return f"{lacking} not in {sentence!a}"
    return None


def refused(arguments: list[Any], *words: str) -> Ending:
    """Run a command that must be refused in one sentence with these words."""
    ending = run(arguments)
    bad = why_bad(ending, *words)
    assert bad is None, bad
    return ending


def settings(**changes: Any) -> RLHFArgs:
    """Return the settings of two small phases."""
    small = {"total_phases": 2, "batch_size": 16, "num_minibatches": 2, "gen_len": 8}
    return RLHFArgs(**({"preset": "reel", "warmup_steps": 0} | small | changes))


def refuses(function: Callable[[], Any], *words: str) -> str:
    """Check that a function raises a LabError of one line with these words; return it."""
    with pytest.raises(LabError) as caught:
        function()
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith((".", ")")), sentence
    assert all(word in sentence for word in words), sentence
    return sentence


def accepted(arguments: list[Any]) -> Ending:
    """Run a command that must end with status 0."""
    ending = run(arguments)
    assert ending.raised is None, repr(ending.raised)
    assert ending.status == 0, ending.err
    return ending


@contextlib.contextmanager
def untouched(*directories: Path) -> Iterator[None]:
    """Check that no file below these directories is changed, made or lost meanwhile."""
    before = [contents(directory) for directory in directories]
    yield
    for directory, found in zip(directories, before, strict=True):
        assert contents(directory) == found


def contents(directory: Path) -> dict[str, str]:
    """Each file below a directory by its name, with a digest of what it holds; links as links."""
    return {
        str(path.relative_to(directory)): (
            f"-> {path.readlink()}"
            if path.is_symlink()
            else hashlib.sha256(path.read_bytes()).hexdigest()
        )
        for path in sorted(directory.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """Stop what takes longer than `PATIENCE`, also in a loop that catches every Exception."""

    def stop(*_: Any) -> None:
        raise Hang(f"hangs: no end after {PATIENCE} s")

    earlier = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
