"""Containment of a learner's function while `check` calls it: a time limit, and no way out.

It guards against accidents, such as a loop without an end or a `sys.exit` left over, and not
against code that means harm: see SECURITY.md.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

SECONDS_PER_CALL = 60.0
"""How long one call on a case may take; those of the exercises take well under a second."""
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
    2. Turn `os._exit`, `os.abort` and `sys.exit` into errors. A function that holds `_exit` from
       before, or crashes the interpreter, still ends the process.
    """
    kept = os._exit, os.abort
    os._exit = os.abort = _refuse_to_end
    try:
        with _timer(SECONDS_PER_CALL if seconds is None else seconds):
            yield
    except SystemExit as error:
        raise Stopped(f"SystemExit: it asked to end the program with {error.code!a:.40}") from None
    finally:
        os._exit, os.abort = kept


def _refuse_to_end(*code: Any) -> None:
    raise Stopped(f"it asked to end the process with {code!a:.40}")


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
