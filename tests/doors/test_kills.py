"""Runs that are killed at any moment, changed and resumed end as one that never was, to the bit."""

import os

import pytest

from tests.doors.killing import kill_runs
from tests.warm import WarmPython

KILLS = int(os.environ.get("RLHF_LAB_KILLS", "8"))
"""How many; set RLHF_LAB_KILLS to have more."""


@pytest.mark.process
@pytest.mark.slow
def test_killed_runs_end_as_one_that_was_not(warm_python: WarmPython, tmp_path) -> None:
    outcome = kill_runs(warm_python, tmp_path, KILLS)
    print(outcome)
    assert outcome.kills.total() >= KILLS
    assert outcome.equal == outcome.runs
    assert not outcome.complaints
