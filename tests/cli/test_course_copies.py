"""`course copy` and `course open`; course/test_wheel.py copies from a wheel."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_lab import __version__
from rlhf_lab.course import copying
from tests.bad_input.command_outcome import accepted, rejected, run, untouched

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
NAMES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.ipynb"))


def test_the_lessons_are_copied_unsolved_and_the_solutions_apart(tmp_path):
    place = tmp_path / "here" / "lessons"
    assert f"{2 * len(NAMES)} notebooks written" in accepted(["course", "copy", place]).out
    for kind, copies in (("notebooks", place), ("solutions", place / "solutions")):
        assert all((copies / x).read_bytes() == (ROOT / kind / x).read_bytes() for x in NAMES)
    cells = [cell for x in NAMES for cell in json.loads((place / x).read_text())["cells"]]
    assert not any(cell.get("outputs") for cell in cells)
    assert (place / "version.txt").read_text() == f"rlhf_lab {__version__}\n"


@pytest.mark.parametrize("file", ["lessons/00_start.ipynb", "lessons"])
def test_copy_never_overwrites(tmp_path, file):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("mine")
    with untouched(tmp_path):
        rejected(["course", "copy", tmp_path / "lessons"], str(tmp_path / "lessons"))


def test_open_copies_first_and_starts_jupyterlab(tmp_path, monkeypatch):
    commands, place = [], tmp_path / "lessons"

    def start(command):
        commands.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(copying, "find_spec", lambda name: object())
    monkeypatch.setattr(copying.subprocess, "run", start)
    assert run(["course", "open", place]).status == 3
    (place / "00_start.ipynb").write_text("mine")
    assert run(["course", "open", place]).status == 3
    assert commands == [[sys.executable, "-m", "jupyterlab", str(place)]] * 2
    assert (place / "00_start.ipynb").read_text() == "mine"


def test_open_without_jupyterlab_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(copying, "find_spec", lambda name: None)
    with untouched(tmp_path):
        rejected(["course", "open", tmp_path / "lessons"], 'pip install -e ".[course]"')
