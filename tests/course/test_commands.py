"""The course on the command line: the learner's progress, and what its authors run."""

from pathlib import Path

import pytest

from rlhf_lab.__main__ import main as lab
from rlhf_lab.course.exercise import all_exercises
from rlhf_lab.course.progress_file import note_attempt
from tools.course.__main__ import main


def test_progress_shows_the_table_and_where_it_is_kept(
    capsys: pytest.CaptureFixture, progress_file: Path
) -> None:
    note_attempt("compute_gae", "passed")
    assert lab(["progress"]) == 0
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if line.strip().startswith("compute_gae"))
    assert "✓ passed" in row and "●●●●○" in row
    assert f"1 of {len(all_exercises())} passed" in said and str(progress_file) in said


def test_building_an_unknown_lesson_or_in_the_wrong_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["build", "--root", str(tmp_path)]) == 2
    assert "has no lesson" in capsys.readouterr().err
    (tmp_path / "solutions").mkdir()
    (tmp_path / "solutions" / "01_one.py").write_text("# %%\n1\n")
    assert main(["build", "two", "--root", str(tmp_path)]) == 2
    assert "lesson 'two' is unknown; choose from one." in capsys.readouterr().err


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
