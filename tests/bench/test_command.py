"""`python -m benchmarks` as a real process: what it prints, stores and refuses."""

import json
import os
import signal
import time

import pytest

from benchmarks.__main__ import main


@pytest.fixture(scope="module")
def measured(tmp_path_factory, warm_python, surroundings):
    """The command on the smallest shape, and where it stored its results."""
    place = tmp_path_factory.mktemp("bench")
    arguments = smallest(place, "--peers", str(place))
    return warm_python.run(arguments, env=surroundings | {"COLUMNS": "120"}), place


def smallest(place, *options):
    """What follows `python`: the command on the smallest shape, which stores its results."""
    size = ("--shape", "nano", "--batch-size", "8", "--gen-len", "6", "--repeats", "1")
    where = ("--threads", "1", "--device", "cpu", "--out", str(place / "nano.jsonl"))
    return ["-m", "benchmarks", *size, *where, *options]


def test_it_times_ours_and_the_naive_loop_and_says_who_is_missing(measured):
    done, place = measured
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("nano: batch 8, 6 new tokens, cpu, 1 threads; this will take")
    assert done.stdout.count("make bench-peers") == 2
    for title in ("seconds of each stage", "the arithmetic alone", "tokens/s"):
        assert title in done.stdout
    assert "Writing model shards" not in done.stderr


def test_what_it_stores_adds_up(measured):
    result = json.loads((measured[1] / "nano.jsonl").read_text())
    assert result["contestants"].keys() == {"ours", "ours-residual", "ours-pattern", "naive"}
    assert result["left_out"].keys() == {"trl-0.11.4", "trl-1.12"}
    for contestant in result["contestants"].values():
        (phase,) = contestant["phases"]
        assert set(phase["stages"]) == {
            "rollout/sampling",
            "rollout/scoring",
            "learning/minibatches",
            "learning/forward",
            "learning/backward",
            "learning/optimizer",
        }
        assert phase["rollout"] + phase["learning"] == pytest.approx(phase["seconds"], rel=0.01)
        assert sum(phase["stages"].values()) <= phase["seconds"] * 1.001
        assert phase["peak_bytes"] > 0
    assert str(measured[1]) not in json.dumps(result)


def test_a_kill_loses_only_the_kind_that_was_being_measured(tmp_path, warm_python):
    stored = tmp_path / "nano.jsonl"
    arguments = smallest(tmp_path, "--against", "--generation", "--growth")
    with open(os.devnull, "r+") as nothing:
        process = warm_python.start(arguments, (nothing.fileno(),) * 3)
    deadline = time.monotonic() + 600
    while not stored.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert json.loads(stored.read_text()).keys() >= {"machine", "work", "floor", "contestants"}


def test_the_page_is_written_from_what_was_stored(measured):
    stored, page = measured[1] / "nano.jsonl", measured[1] / "performance.md"
    aims = page.with_name("aims.md")
    assert main(["--write-docs", str(stored), "--docs", str(page), "--aims", str(aims)]) == 0
    text = page.read_text()
    assert "## nano, cpu, fp32" in text
    assert "[nano.jsonl](nano.jsonl)" in text
    assert "| nano, fp32: seconds of --help | at most 1 | not measured |" in aims.read_text()


MISTAKES = {
    "unknown_shape": (("--shape", "huge"), ("huge",)),
    "unknown_contestant": (("--against", "trlx"), ("against='trlx'", "naive")),
    "unknown_commit": (("--against-commit", "nowhen"), ("against_commit='nowhen'", "git log")),
    "no_repeats": (("--repeats", "0"), ("repeats=0",)),
    "odd_batch": (("--batch-size", "30"), ("batch_size=30", "multiple")),
    "too_long": (("--gen-len", "400"), ("gen_len=400", "124")),
    "unknown_device": (("--device", "abacus"), ("device='abacus'",)),
    "no_such_result": (("--write-docs", "nowhere.json"), ("nowhere.json", "name a file")),
    "no_result": (("--write-docs", "pyproject.toml"), ("pyproject.toml", "line 1", "another file")),
}


@pytest.mark.process
@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_answered_in_one_sentence(case, capsys):
    arguments, words = MISTAKES[case]
    assert main(list(arguments)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.strip().splitlines()
    assert line.startswith("benchmarks: ")
    assert all(word in line for word in words), line
