"""Commands timed as processes of their own."""

import pytest

from benchmarks import command_times as module
from benchmarks.command_times import FIRST_SAMPLES, HELP, MAIN_JOB, command_times
from rlhf_lab.errors import RunError

pytestmark = pytest.mark.process

ONE_PHASE = ("train", "--preset", "reel", "--total-phases", "1", "--warmup-steps", "0")


def test_the_first_samples_come_before_the_end_and_help_before_both(monkeypatch):
    monkeypatch.setattr(module, "TRAIN", ONE_PHASE)
    told = []
    found = command_times(1, 1, lambda name, turn, answer: told.append((name, turn)))
    (help_,), (first,), (whole,) = found[HELP], found[FIRST_SAMPLES], found[MAIN_JOB]
    assert 0 < help_ < first < whole
    assert told == [(HELP, 0), (MAIN_JOB, 0)]


def test_a_command_that_fails_is_an_error_with_its_last_words(monkeypatch):
    monkeypatch.setattr(module, "TRAIN", ("train", "--gen-len", "0"))
    with pytest.raises(RunError, match="train failed: .*gen_len"):
        command_times(1, 1, lambda name, turn, answer: None)
