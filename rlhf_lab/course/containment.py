"""Containment of a learner's function while `check` calls it: a time limit, and no way out.

It guards against accidents, such as a loop without an end or a `sys.exit` left over, and not
against code that means harm: see SECURITY.md.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from rlhf_lab.torch_modes import torch_modes_kept

SECONDS_PER_CALL = 60.0
"""How long one call on a case may take; those of the exercises take well under a second."""
SECONDS_PER_WORDS = 2.0
"""How long a value may take to be put into words."""
_AGAIN = 0.5
"""Seconds until a function that caught the limit meets it again."""


class Stopped(BaseException):
    """A call that was ended: no Exception, so that a learner's own `except` lets it through."""


@contextlib.contextmanager
def contained(seconds: float | None = None) -> Iterator[None]:
    """Run a call so that it comes back: raises Stopped where it would not, with the reason.

    1. After `seconds` (SECONDS_PER_CALL when None), stop it; there is no limit where the system has
       no timer for it (Windows), outside the main thread, where a timer runs already, and within an
       operation of torch, which is stopped when it is over.
    2. Turn `os._exit`, `os.abort`, `os.fork` and `sys.exit` into errors, and whatever else is no
       Exception, but for Ctrl-C. A function that holds `_exit` from before, or crashes the
       interpreter, still ends the process.
    3. Put back what holds for the whole process, see `_as_before`.
    """
    try:
        with _as_before(), _timer(SECONDS_PER_CALL if seconds is None else seconds):
            yield
    except (Exception, KeyboardInterrupt, Stopped):
        raise
    except SystemExit as error:
        raise Stopped(f"SystemExit: it asked to end the program with {error.code!a:.40}") from None
    except BaseException as error:
        raise Stopped(f"{type(error).__name__}: it is raised, and is no Exception") from None


def _refuse_to_end(*code: Any) -> None:
    raise Stopped(f"it asked to end the process with {code!a:.40}")


def _refuse_to_fork() -> None:
    raise Stopped("it asked to start a process, which would go on with the check, too")


@contextlib.contextmanager
def _as_before() -> Iterator[None]:
    """Put back what a call changes for the whole process.

    These are torch's gradients, default dtype and noise, without which the next comparison would be
    wrong; standard output, the working directory and the environment, without which the result and
    the progress file would go elsewhere; and the limit of recursion.
    """
    refusals = {"_exit": _refuse_to_end, "abort": _refuse_to_end, "fork": _refuse_to_fork}
    kept = {name: getattr(os, name) for name in refusals if hasattr(os, name)}
    streams, variables = (sys.stdout, sys.stderr), dict(os.environ)
    recursion, noise = sys.getrecursionlimit(), torch.random.get_rng_state()
    place = None
    with contextlib.suppress(OSError):  # a directory that is gone already
        place = os.getcwd()
    try:
        for name in kept:
            setattr(os, name, refusals[name])
        with torch_modes_kept():
            yield
    finally:
        sys.setrecursionlimit(recursion)
        for name, function in kept.items():
            setattr(os, name, function)
        sys.stdout, sys.stderr = streams
        torch.random.set_rng_state(noise)
        if os.environ != variables:
            os.environ.clear()
            os.environ.update(variables)
        if place is not None:
            with contextlib.suppress(OSError):  # it may be gone
                os.chdir(place)


@contextlib.contextmanager
def _timer(seconds: float) -> Iterator[None]:
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not (hasattr(signal, "setitimer") and in_main_thread) or any(
        signal.getitimer(signal.ITIMER_REAL)
    ):
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(f"it took longer than {seconds:g} s, and was stopped; does a loop never end?")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
