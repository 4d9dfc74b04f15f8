"""Contestants in turn, what is made of their answers, and processes that end early."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.contestants import start_of, started
from benchmarks.harness import ContestantProcess, interleave
from benchmarks.summary import exponent, growth_exponent, probe_cost, rows
from benchmarks.work import Work
from rlhf_lab.errors import ConfigError, RunError


def answer(seconds: float, peak: int = 100, **stages: float) -> dict:
    return {
        "seconds": seconds,
        "rollout": seconds / 4,
        "learning": seconds / 2,
        "stages": stages,
        "peak_bytes": peak,
    }


class Scripted:
    """Answers with the times it was given, and notes when it was asked."""

    def __init__(self, name, seconds, log):
        self.name, self.seconds, self.log = name, list(seconds), log

    def phase(self):
        self.log.append(self.name)
        return answer(self.seconds.pop(0))


def test_contestants_take_turns_and_the_first_turn_does_not_count():
    log, told = [], []
    a, b = Scripted("a", [9, 1, 2, 3], log), Scripted("b", [9, 4, 5, 6], log)
    answers = interleave([a, b], 3, lambda name, turn, _: told.append((name, turn)))
    assert log == list("abababab")
    assert told == [(name, turn) for turn in range(4) for name in "ab"]
    assert [x["seconds"] for x in answers["a"]] == [1, 2, 3]
    assert [x["seconds"] for x in answers["b"]] == [4, 5, 6]


def test_every_turn_counts_without_warm_up():
    answers = interleave([Scripted("a", [9, 1], [])], 2, warmups=0)
    assert [x["seconds"] for x in answers["a"]] == [9, 1]


def test_rows_are_medians_ratios_and_the_highest_peak():
    figures = {
        "ours": {
            "loaded_bytes": 40,
            "phases": [answer(4.0, s=1.0), answer(8.0, 300, s=5.0), answer(2.0, s=2.0)],
        },
        "other": {"loaded_bytes": 10, "phases": [answer(6.0), answer(10.0)]},
    }
    ours, other = rows(figures, tokens=80)
    assert (ours.seconds, ours.rollout, ours.learning, ours.ratio) == (4.0, 1.0, 2.0, 1.0)
    assert (ours.peak_bytes, ours.over_model_bytes) == (300, 260)
    assert ours.tokens_per_second == 20.0
    assert ours.stages == {"s": 2.0}
    assert (other.seconds, other.ratio, other.over_model_bytes) == (8.0, 2.0, 90)


def test_without_ours_there_is_no_ratio():
    (row,) = rows({"other": {"loaded_bytes": 0, "phases": [answer(6.0)]}}, tokens=1)
    assert row.ratio is None


def test_exponent_by_hand():
    # From 8 to 64 three doublings; the time doubles, quadruples or stays at each.
    assert exponent([8, 16, 32, 64], [1, 2, 4, 8]) == pytest.approx(1.0)
    assert exponent([8, 16, 32, 64], [1, 4, 16, 64]) == pytest.approx(2.0)
    assert exponent([8, 64], [5, 5]) == pytest.approx(0.0)
    # Doublings x = 0, 1, 2 with y = 0, 0, 3 in halvings: slope (-1 * 0 + 1 * 3) / 2 = 1.5.
    assert exponent([1, 2, 4], [1, 1, 8]) == pytest.approx(1.5)


def test_growth_takes_the_medians_of_each_size():
    measured = [
        {"gen_len": 25, "phases": [answer(1.0), answer(99.0), answer(1.0)]},
        {"gen_len": 100, "phases": [answer(2.0)]},
    ]
    assert growth_exponent(measured, "gen_len") == pytest.approx(0.5)


def test_probe_cost_is_a_share_of_the_run_without_them():
    figures = {
        "ours-run": {"phases": [answer(4.0), answer(6.0)]},
        "ours-run-with-probes": {
            "phases": [answer(5.0, **{"probes/a": 0.5}), answer(6.0, **{"probes/a": 0.25})]
        },
    }
    share, each = probe_cost(figures)
    assert share == pytest.approx(0.1)
    assert each == {"a": 0.75}


CHATTY = """
import json, sys
from benchmarks.worker import serve
def load(setup):
    print("libraries print things")
    def phase(clock):
        print("again")
        sum(range(100_000)); clock.lap("rollout/a")
        blob = bytearray(40_000_000)
        import time; time.sleep(0.05)
        clock.lap("learning/b"); clock.lap("learning/b")
    return phase
serve(load, ("torch",))
"""
SETUP = {"threads": 1, "seed": 1, "device": "cpu"}


@pytest.mark.process
def test_a_process_answers_in_lines_whatever_its_libraries_print():
    contestant = ContestantProcess("chatty", [sys.executable, "-c", CHATTY], SETUP)
    try:
        assert contestant.about["versions"].keys() == {"torch"}
        first, second = contestant.phase(), contestant.phase()
    finally:
        contestant.close()
    for one in (first, second):
        assert set(one["stages"]) == {"rollout/a", "learning/b"}
        assert one["seconds"] >= one["rollout"] + one["learning"] - 1e-3
        assert one["learning"] >= 0.05
        assert one["peak_bytes"] - contestant.about["loaded_bytes"] > 20_000_000


@pytest.mark.process
def test_a_process_that_dies_is_one_sentence_with_its_last_words():
    dying = "import sys; sys.stdin.readline(); raise ValueError('no such shape')"
    with pytest.raises(RunError) as refusal:
        ContestantProcess("dying", [sys.executable, "-c", dying], SETUP)
    assert "dying ended early: ValueError: no such shape" in str(refusal.value)


@pytest.mark.process
def test_a_process_that_dies_later_is_one_sentence_too():
    lines = "import sys; sys.stdin.readline(); print('{}', flush=True); sys.stdin.readline()"
    contestant = ContestantProcess("brief", [sys.executable, "-c", lines], SETUP)
    with pytest.raises(RunError) as refusal:
        contestant.phase()
    assert "brief ended early: it said nothing." in str(refusal.value)


def test_a_peer_that_is_not_built_is_left_out_with_a_sentence(tmp_path):
    with started(["trl-1.12"], Work(shape="nano"), tmp_path, peers=tmp_path) as (there, left_out):
        assert there == []
    assert "trl-1.12 is left out" in left_out["trl-1.12"]
    assert "make bench-peers" in left_out["trl-1.12"]


@pytest.mark.process
def test_a_peer_that_is_broken_is_one_sentence(tmp_path):
    python = tmp_path / "trl-1.12" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho no torch here >&2\n")
    python.chmod(0o755)
    with pytest.raises(RunError, match="trl-1.12 ended early: no torch here"):
        with started(["trl-1.12"], Work(shape="nano"), tmp_path, peers=tmp_path):
            pass


def test_an_unknown_contestant_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match="'trlx' is unknown; choose of ours-residual, ours-pattern, ours-all"
    ):
        start_of("trlx", tmp_path, ExitStack())


def test_a_setup_is_plain_json():
    setup = Work(shape="nano").setup(model=Path("m"))
    assert json.loads(json.dumps(setup)) == setup
