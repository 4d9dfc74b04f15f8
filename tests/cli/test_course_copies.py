"""`course copy` and `course open`: the lessons for whoever has the package and no clone."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_lab import __version__
from rlhf_lab.__main__ import main
from rlhf_lab.course import copying

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))


def cells(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def test_the_lessons_are_copied_unsolved_and_the_solutions_apart(tmp_path, capsys):
    place = tmp_path / "here" / "lessons"
    assert main(["course", "copy", str(place)]) == 0
    assert f"{2 * len(NAMES)} notebooks written" in capsys.readouterr().out
    for kind, found in (("notebooks", place), ("solutions", place / "solutions")):
        assert sorted(path.name for path in found.glob("*.ipynb")) == NAMES
        for name in NAMES:
            assert (found / name).read_bytes() == (ROOT / kind / name).read_bytes()
    assert not any(cell.get("outputs") for name in NAMES for cell in cells(place / name))
    assert (place / "version.txt").read_text() == f"rlhf_lab {__version__}\n"


@pytest.mark.parametrize("there", ["a lesson begun", "another file", "a file in its place"])
def test_what_is_there_is_never_written_over(tmp_path, capsys, there):
    place = tmp_path / "lessons"
    kept = place if there == "a file in its place" else place / "00_start.ipynb"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("mine")
    assert main(["course", "copy", str(place)]) == 2
    assert str(place) in capsys.readouterr().err and kept.read_text() == "mine"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [kept]


def test_open_copies_first_and_starts_jupyterlab_there(tmp_path, monkeypatch):
    started = []

    def run(command):
        started.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(copying, "find_spec", lambda name: object())
    monkeypatch.setattr(copying.subprocess, "run", run)
    place = tmp_path / "lessons"
    assert main(["course", "open", str(place)]) == 3
    (place / "00_start.ipynb").write_text("mine")
    assert main(["course", "open", str(place)]) == 3
    assert started == [[sys.executable, "-m", "jupyterlab", str(place)]] * 2
    assert (place / "00_start.ipynb").read_text() == "mine"
    assert (place / "06_ppo.ipynb").is_file()


def test_open_without_jupyterlab_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(copying, "find_spec", lambda name: None)
    assert main(["course", "open", str(tmp_path / "lessons")]) == 2
    assert 'pip install -e ".[course]"' in capsys.readouterr().err
    assert not (tmp_path / "lessons").exists()


@pytest.mark.process
def test_the_layout_of_a_wheel_has_them_too(tmp_path):
    """As setup.py maps them: beside the code; away from the clone, and without them, refused."""
    site = tmp_path / "site"
    left_out = shutil.ignore_patterns("__pycache__", "weights")
    shutil.copytree(ROOT / "rlhf_lab", site / "rlhf_lab", ignore=left_out)

    def copy(name: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "rlhf_lab", "course", "copy", name],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
        )

    refused = copy("none")
    assert refused.returncode == 2 and "are not beside the package" in refused.stderr
    mapped = {}
    source = (ROOT / "setup.py").read_text(encoding="utf-8")
    source = source.replace("from setuptools import find_packages, setup", "")
    exec(source, {"setup": mapped.update, "find_packages": lambda include: ["rlhf_lab"]})
    assert set(mapped["package_dir"]) <= set(mapped["packages"])
    for package, kind in mapped["package_dir"].items():
        shutil.copytree(ROOT / kind, site.joinpath(*package.split(".")))
    done = copy("lessons")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "lessons").glob("*.ipynb")) == NAMES
