"""Time limit and exit guard for a learner's function while `check` calls it.

It guards against accidents, such as an endless loop or a forgotten `sys.exit`, not against
malicious code: see SECURITY.md.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import torch

from rlhf_lab.torch_modes import torch_modes_kept

SECONDS_PER_CALL = 60.0  # for one case; the exercises take well under a second
_AGAIN = 0.5  # seconds until a function that caught the limit meets it again


class Stopped(BaseException):
    """Raised when a call was stopped; not an Exception, so `except Exception` lets it through."""


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Run a call that must return, or raise Stopped with the reason.

    1. Stop it after SECONDS_PER_CALL. There is no limit on Windows, outside the main thread, and
       during an operation of torch.
    2. Turn `sys.exit` and every other BaseException except Ctrl-C into Stopped. `os._exit` and a
       crash of the interpreter still end the process.
    3. Restore torch's modes and random state.
    """
    random_state = torch.random.get_rng_state()
    try:
        with torch_modes_kept(), _time_limit():
            yield
    except (Exception, KeyboardInterrupt, Stopped):
        raise
    except BaseException as error:
        raise Stopped(f"{type(error).__name__}: the function tried to end the program") from None
    finally:
        torch.random.set_rng_state(random_state)


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not (hasattr(signal, "setitimer") and in_main_thread) or any(
        signal.getitimer(signal.ITIMER_REAL)
    ):
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        limit = f"stopped after {SECONDS_PER_CALL:g} s"
        raise Stopped(f"{limit}: is there an endless loop?")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS_PER_CALL, _AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
