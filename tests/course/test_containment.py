"""What `check` does with a function that does not come back, or cannot be shown."""

import os
import signal
import sys
import time

import pytest
import torch

from rlhf_lab.course import check, containment
from rlhf_lab.course.containment import Stopped, contained
from rlhf_lab.course.grading import verdict_on
from rlhf_lab.course.registry import find_exercise


def verdict_of(body):
    """The verdict on an answer to masked_mean that does nothing but `body`."""

    def masked_mean(*arguments, **named):
        return body()

    return verdict_on(find_exercise("masked_mean"), masked_mean)


def raised(verdict) -> str:
    assert verdict.state == "differs" and verdict.difference.kind == "error"
    return verdict.difference.rows[0][1]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer on this system")
@pytest.mark.parametrize("caught", [(), Exception])
def test_an_endless_loop_is_stopped_once_and_told(monkeypatch, caught) -> None:
    monkeypatch.setattr(containment, "SECONDS_PER_CALL", 0.2)
    calls = []

    def loop():
        calls.append(1)
        while True:
            try:
                time.sleep(0.01)
            except caught:
                continue

    assert "longer than 0.2 s" in raised(verdict_of(loop)) and len(calls) == 1


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer on this system")
def test_a_loop_that_catches_everything_once_meets_the_limit_again(monkeypatch) -> None:
    monkeypatch.setattr(containment, "SECONDS_PER_CALL", 0.1)
    monkeypatch.setattr(containment, "_AGAIN", 0.1)

    def stubborn():
        try:
            time.sleep(5)
        except BaseException:
            time.sleep(5)

    began = time.monotonic()
    assert "longer than" in raised(verdict_of(stubborn))
    assert time.monotonic() - began < 4


@pytest.mark.parametrize(
    "leave", [lambda: sys.exit(3), lambda: os._exit(3), lambda: os.abort(), lambda: exit(3)]
)
def test_a_function_that_ends_the_program_is_told_so(leave) -> None:
    assert "asked to end the pro" in raised(verdict_of(leave))


def test_what_was_there_before_is_there_again() -> None:
    before = os._exit, os.abort, signal.getsignal(signal.SIGINT)
    alarm = signal.getsignal(signal.SIGALRM) if hasattr(signal, "SIGALRM") else None
    with pytest.raises(Stopped), contained():
        os._exit(1)
    assert before == (os._exit, os.abort, signal.getsignal(signal.SIGINT))
    if alarm is not None:
        assert signal.getsignal(signal.SIGALRM) == alarm
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_value_whose_repr_raises_is_shown_by_its_type(capsys) -> None:
    class Shy:
        def __repr__(self):
            raise RuntimeError("no")

    def masked_mean(*arguments, **named):
        return Shy()

    check(masked_mean)
    assert "a Shy that cannot be shown (RuntimeError)" in capsys.readouterr().out


def test_an_error_whose_words_raise_is_shown_by_its_type(capsys) -> None:
    class Odd(Exception):
        def __str__(self):
            sys.exit(0)

    def masked_mean(*arguments, **named):
        raise Odd

    check(masked_mean)
    assert "a Odd that cannot be shown" in capsys.readouterr().out


def test_ctrl_c_is_the_learners_own() -> None:
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verdict_of(interrupted)


def test_a_right_answer_still_passes() -> None:
    exercise = find_exercise("masked_mean")
    assert verdict_on(exercise, exercise.reference).state == "passed"
    assert torch.equal(exercise.reference(torch.ones(2)), torch.tensor(1.0))
