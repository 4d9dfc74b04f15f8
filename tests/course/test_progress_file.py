"""The progress file survives whatever happens to it."""

import json
import os
import re
from pathlib import Path

import pytest

from rlhf_lab.course import progress
from rlhf_lab.course.progress_file import (
    ExerciseRecord,
    note_attempt,
    note_hint,
    progress_path,
    read_records,
)


def test_attempts_and_hints_are_kept_and_a_pass_stays_a_pass() -> None:
    note_attempt("a", "differs")
    note_attempt("a", "passed")
    note_attempt("a", "differs")
    note_hint("a", 2)
    note_hint("a", 1)
    note_attempt("b", "unwritten")
    assert read_records() == {
        "a": ExerciseRecord("passed", 3, 2),
        "b": ExerciseRecord("unwritten", 1, 0),
    }


MOVED = {
    "normalize_reward": "03_rewards_and_credit",
    "compute_advantages": "03_rewards_and_credit",
    "compute_gae": "03_rewards_and_credit",
    "compute_returns": "03_rewards_and_credit",
    "kl_per_token": "04_the_leash",
    "calc_kl_penalty": "04_the_leash",
    "kl_estimate": "04_the_leash",
}


@pytest.mark.parametrize("name", MOVED)
def test_a_tick_is_kept_where_the_exercise_has_moved_to_another_lesson(
    progress_file: Path, capsys: pytest.CaptureFixture, name: str
) -> None:
    """The file as it was stored before: it has names of exercises, and none of lessons."""
    progress_file.parent.mkdir()
    ticked = {name: {"state": "passed", "attempts": 2, "hints": 1}}
    progress_file.write_text(json.dumps({"version": 1, "exercises": ticked}))
    progress()
    lines = capsys.readouterr().out.splitlines()
    place = next(i for i, line in enumerate(lines) if line.split()[:1] == [name])
    heading = next(line for line in reversed(lines[:place]) if re.match(r" *\d\d_", line))
    assert heading.strip() == MOVED[name] and "passed" in lines[place]
    assert sum("passed " in line for line in lines) == 1


def test_no_file_means_no_records(progress_file: Path) -> None:
    assert not progress_file.exists()
    assert read_records() == {}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"exercises": 3}', "\x00\xff", "null"])
def test_a_corrupt_file_is_put_aside_and_progress_goes_on(
    progress_file: Path, content: str
) -> None:
    progress_file.parent.mkdir()
    progress_file.write_text(content, encoding="latin-1")
    assert read_records() == {}
    aside = progress_file.with_name("progress.json.unreadable")
    assert aside.read_text(encoding="latin-1") == content
    assert note_attempt("a", "passed") is None
    assert read_records() == {"a": ExerciseRecord("passed", 1, 0)}


def test_a_pipe_is_neither_waited_for_nor_moved(progress_file: Path) -> None:
    """Nor is a device: /dev/null was renamed where the tests ran as root."""
    progress_file.parent.mkdir()
    os.mkfifo(progress_file)
    assert read_records() == {}
    assert "a pipe" in note_attempt("a", "passed")
    assert [path.name for path in progress_file.parent.iterdir()] == [progress_file.name]
    assert progress_file.is_fifo()


def test_a_record_that_makes_no_sense_is_left_out_and_the_others_are_kept(
    progress_file: Path,
) -> None:
    progress_file.parent.mkdir()
    good = {"state": "passed", "attempts": 1, "hints": 0}
    odd = [{"state": "great", "attempts": 1, "hints": 0}, {"state": "passed"}, 7]
    stored = {"good": good} | {f"odd{i}": record for i, record in enumerate(odd)}
    progress_file.write_text(json.dumps({"version": 1, "exercises": stored}))
    assert read_records() == {"good": ExerciseRecord("passed", 1, 0)}


def test_a_place_that_cannot_be_written_is_told_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLHF_LAB_PROGRESS", str(tmp_path / "file" / "progress.json"))
    assert note_attempt("a", "passed").startswith("progress is not saved")
    assert read_records() == {}


def test_away_from_lessons_the_file_is_in_the_users_data_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RLHF_LAB_PROGRESS")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert progress_path() == tmp_path / "rlhf_lab" / "progress.json"


@pytest.mark.parametrize("kind", ["clone", "copy"])
def test_two_checkouts_know_nothing_of_each_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    monkeypatch.delenv("RLHF_LAB_PROGRESS")
    own = {"clone": ["rlhf_lab/course/progress_file.py"], "copy": ["version.txt", "00_start.ipynb"]}
    for name in ("one", "two"):
        for file in own[kind]:
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        (tmp_path / name / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "one" / "notebooks")
    note_attempt("a", "passed")
    assert progress_path() == tmp_path / "one" / ".progress.json"
    monkeypatch.chdir(tmp_path / "one")
    assert read_records() == {"a": ExerciseRecord("passed", 1, 0)}
    monkeypatch.chdir(tmp_path / "two" / "notebooks")
    assert read_records() == {}
