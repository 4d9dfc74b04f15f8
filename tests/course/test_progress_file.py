"""The progress file survives whatever happens to it."""

import json
import os
from pathlib import Path

import pytest

from rlhf_lab.course.progress_file import (
    ExerciseRecord,
    note_attempt,
    note_hint,
    progress_path,
    read_records,
)

PASSED = {"state": "passed", "attempts": 1, "hints": 0}


def test_attempts_and_hints_are_kept_and_a_pass_stays_a_pass(progress_file: Path) -> None:
    assert not progress_file.exists() and read_records() == {}
    for state in ("differs", "passed", "differs"):
        note_attempt("a", state)
    note_hint("a", 2)
    note_hint("a", 1)
    note_attempt("b", "unwritten")
    assert read_records() == {
        "a": ExerciseRecord("passed", 3, 2),
        "b": ExerciseRecord("unwritten", 1, 0),
    }


@pytest.mark.parametrize("content", ["", "{", "[]", '{"exercises": 3}', "\x00\xff", "null"])
def test_damaged_file_is_moved_aside(progress_file: Path, content: str, capsys) -> None:
    progress_file.parent.mkdir()
    progress_file.write_text(content, encoding="latin-1")
    assert read_records() == {}
    aside = progress_file.with_name("progress.json.unreadable")
    assert aside.read_text(encoding="latin-1") == content
    note_attempt("a", "passed")
    assert read_records() == {"a": ExerciseRecord("passed", 1, 0)} and not capsys.readouterr().out


def test_pipe_is_neither_read_nor_moved(progress_file: Path, capsys) -> None:
    progress_file.parent.mkdir()
    os.mkfifo(progress_file)
    assert read_records() == {}
    note_attempt("a", "passed")
    assert "pipe" in capsys.readouterr().out
    assert [path.name for path in progress_file.parent.iterdir()] == [progress_file.name]
    assert progress_file.is_fifo()


def test_invalid_records_are_left_out(progress_file: Path) -> None:
    progress_file.parent.mkdir()
    invalid = [PASSED | {"unknown": 1}, 7]
    stored = {"good": PASSED} | {f"invalid{i}": record for i, record in enumerate(invalid)}
    progress_file.write_text(json.dumps({"version": 1, "exercises": stored}))
    assert read_records() == {"good": ExerciseRecord("passed", 1, 0)}


@pytest.mark.parametrize("name", ["file/progress.json", ".", "null", "x" * 5000])
def test_unwritable_file_prints_a_message(tmp_path: Path, monkeypatch, capsys, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "null").symlink_to("/dev/null")
    monkeypatch.setenv("RLHF_LAB_PROGRESS", str(tmp_path / name))
    note_attempt("a", "passed")
    assert capsys.readouterr().out.startswith("progress is not saved")
    assert read_records() == {} and (tmp_path / "null").is_symlink()


def test_path_is_in_the_data_folder_outside_of_lessons(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RLHF_LAB_PROGRESS")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert progress_path() == tmp_path / "rlhf_lab" / "progress.json"


@pytest.mark.parametrize(
    "files", [["rlhf_lab/course/progress_file.py"], ["version.txt", "00_start.ipynb"]]
)
def test_each_clone_or_copy_has_its_own_file(monkeypatch, tmp_path: Path, files) -> None:
    monkeypatch.delenv("RLHF_LAB_PROGRESS")
    for path in (tmp_path / name / file for name in ("one", "two") for file in files):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (tmp_path / "one" / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "one" / "notebooks")
    note_attempt("a", "passed")
    assert progress_path() == tmp_path / "one" / ".progress.json"
    monkeypatch.chdir(tmp_path / "two")
    assert read_records() == {}


NEW_RUN = """
from rlhf_lab.course import new_run
path = new_run("mine")
path.mkdir()
print(path, path.is_dir())
"""


def test_new_run_is_removed_when_its_process_ends(warm_python) -> None:
    path, was_kept = warm_python.run(["-c", NEW_RUN]).stdout.split()
    assert path.endswith("/mine") and was_kept == "True"
    assert not Path(path).parent.exists()
