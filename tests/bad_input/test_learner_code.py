"""Learners' functions that hang, exit, raise or change global state: each gets a verdict."""

import os
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlhf_lab.course import check, containment
from rlhf_lab.course.containment import Stopped, contained
from rlhf_lab.course.progress_file import ExerciseRecord, note_attempt, read_records

HEAD = """\
import functools, inspect, os, signal, sys, threading, time, types, warnings
from rlhf_lab.functional import masked_mean

right = inspect.unwrap(masked_mean)
"""
ANSWER = "def masked_mean(*args, **kwargs):\n"
TIMER = pytest.mark.skipif(not hasattr(os, "fork"), reason="no timer on this system")
DIFFERS = {
    "endless loop": (
        "while kwargs.get('mask') is not None: pass\nreturn right(*args, **kwargs)",
        "case: masked: ",
    ),
    "sys.exit": ("sys.exit(3)", "end the program"),
    "a generator": ("yield right(*args, **kwargs)", "generator"),
    "grad switched off": (
        "import torch\ntorch.set_grad_enabled(False)\nreturn right(*args, **kwargs)",
        "detached",
    ),
    "dtype switched": (
        "import torch\ntorch.set_default_dtype(torch.float64)\nreturn torch.tensor(1.0)",
        "",
    ),
    "error with markup": ("raise ValueError('[/red] <b> [link=x]')", "[/red] <b> [link=x]"),
}


@pytest.fixture
def learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A directory with progress, given by a relative name. Global state must not change."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLHF_LAB_PROGRESS", "progress.json")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(containment, "SECONDS_PER_CALL", 0.4)
    note_attempt("get_advantages", "passed")
    modes = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        yield
        assert modes == (torch.is_grad_enabled(), torch.get_default_dtype())
    finally:
        torch.set_grad_enabled(modes[0])
        torch.set_default_dtype(modes[1])


def make(body: str, tmp_path: Path):
    """Return `masked_mean` with this body, from a file."""
    source = HEAD + ANSWER + textwrap.indent(body, "    ")
    path = tmp_path / "mine.py"
    path.write_text(source)
    names = {"__file__": str(path), "__name__": "mine"}
    exec(compile(source, str(path), "exec"), names)
    return names["masked_mean"]


@TIMER
@pytest.mark.parametrize("name", DIFFERS)
def test_wrong_function_gets_a_verdict_and_progress_is_kept(
    learner, tmp_path, capsys, name
) -> None:
    body, words = DIFFERS[name]
    check(make(body, tmp_path))
    out = capsys.readouterr().out
    assert words in out and "✗ masked_mean" in out
    kept = {
        "get_advantages": ExerciseRecord("passed", 1),
        "masked_mean": ExerciseRecord("differs", 1),
    }
    assert read_records() == kept


@TIMER
def test_contained_stops_a_loop_that_catches_everything_once(monkeypatch) -> None:
    monkeypatch.setattr(containment, "_AGAIN", 0.1)
    monkeypatch.setattr(containment, "SECONDS_PER_CALL", 0.1)
    start, before = time.monotonic(), signal.getsignal(signal.SIGALRM)
    with pytest.raises(Stopped, match="0.1 s: is there an endless loop"), contained():
        try:
            time.sleep(5)
        except BaseException:
            time.sleep(5)
    assert time.monotonic() - start < 4
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_contained_raises_interrupts_and_restores_random_state() -> None:
    random_state = torch.random.get_rng_state()
    with pytest.raises(KeyboardInterrupt), contained():
        torch.rand(1)
        raise KeyboardInterrupt
    assert torch.equal(random_state, torch.random.get_rng_state())
