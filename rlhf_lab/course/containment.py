"""Containment of a learner's function while `check` calls it: a time limit, and no exit.

It guards against accidents, such as an endless loop or a forgotten `sys.exit`, not against
malicious code: see SECURITY.md.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from rlhf_lab.torch_modes import torch_modes_kept

SECONDS_PER_CALL = 60.0  # for one case; the exercises take well under a second
SECONDS_PER_WORDS = 2.0  # for the repr of a value
_AGAIN = 0.5  # seconds until a function that caught the limit meets it again


class Stopped(BaseException):
    """A call that was ended: no Exception, so that a learner's own `except` lets it through."""


@contextlib.contextmanager
def contained(seconds: float | None = None) -> Iterator[None]:
    """Run a call that must return, or raise Stopped with the reason.

    1. Stop it after `seconds` (SECONDS_PER_CALL if None). There is no limit on Windows, outside the
       main thread, and during an operation of torch.
    2. Turn `os._exit`, `os.abort`, `sys.exit` and every other BaseException except Ctrl-C into
       Stopped. A crash of the interpreter still ends the process.
    3. Restore torch's modes and random state.
    """
    exits = {name: getattr(os, name) for name in ("_exit", "abort")}
    noise = torch.random.get_rng_state()
    try:
        for name in exits:
            setattr(os, name, _raise_stopped)
        with torch_modes_kept(), _timer(SECONDS_PER_CALL if seconds is None else seconds):
            yield
    except (Exception, KeyboardInterrupt, Stopped):
        raise
    except BaseException as error:
        raise Stopped(f"{type(error).__name__}: it tried to end the program") from None
    finally:
        for name, function in exits.items():
            setattr(os, name, function)
        torch.random.set_rng_state(noise)


def _raise_stopped(*code: Any) -> None:
    raise Stopped("it tried to end the process")


@contextlib.contextmanager
def _timer(seconds: float) -> Iterator[None]:
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not (hasattr(signal, "setitimer") and in_main_thread) or any(
        signal.getitimer(signal.ITIMER_REAL)
    ):
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(f"it took longer than {seconds:g} s, and was stopped; is a loop endless?")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
