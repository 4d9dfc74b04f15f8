"""A call that `check` makes is stopped, and the process state is restored.

tests/bad_input/test_learner_code.py has the answers of learners.
"""

import signal
import time

import pytest
import torch

from rlhf_lab.course import containment
from rlhf_lab.course.containment import Stopped, contained

TIMER = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer on this system")


@TIMER
def test_contained_stops_a_loop_that_catches_everything_once(monkeypatch) -> None:
    monkeypatch.setattr(containment, "_AGAIN", 0.1)
    monkeypatch.setattr(containment, "SECONDS_PER_CALL", 0.1)
    start, before = time.monotonic(), signal.getsignal(signal.SIGALRM)
    with pytest.raises(Stopped, match="stopped after 0.1 s"), contained():
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
