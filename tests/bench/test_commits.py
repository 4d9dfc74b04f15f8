"""An earlier commit as a contestant: its own files run, and nothing of the work tree changes."""

import subprocess
import sys

import pytest

from benchmarks import contestants
from benchmarks.contestants import files_of, short_hash, started
from benchmarks.work import Work
from rlhf_lab.errors import ConfigError

ANSWERS = """
import json, sys
import {room}
sys.stdin.readline()
print(json.dumps({{"versions": {{"answer": {room}.ANSWER}}, "loaded_bytes": 0}}), flush=True)
"""


pytestmark = pytest.mark.process


@pytest.fixture
def commits(tmp_path, monkeypatch):
    """Two commits of a small repository: one with the benchmark in the package, one beside it."""
    root = tmp_path / "repository"
    root.mkdir()
    monkeypatch.setattr(contestants, "ROOT", root)

    def git(*arguments):
        author = ("-c", "user.name=Nobody", "-c", "user.email=nobody@example.org")
        command = ["git", "-C", str(root), *author, *arguments]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()

    def commit(room, answer):
        place = root.joinpath(*room.split("."))
        place.mkdir(parents=True)
        (root / room.split(".")[0] / "__init__.py").touch()
        (place / "__init__.py").write_text(f"ANSWER = {answer!r}\n")
        (place / "ours.py").write_text(ANSWERS.format(room=room))
        git("add", ".")
        git("commit", "-m", answer)
        return git("rev-parse", "HEAD")

    git("init")
    first = commit("rlhf_lab.bench", "in the package")
    git("rm", "-r", "rlhf_lab")
    second = commit("benchmarks", "beside it")
    (root / "benchmarks" / "__init__.py").write_text("ANSWER = 'not committed'\n")
    return first, second


def test_each_commit_runs_its_own_files(commits, tmp_path):
    names = [f"ours@{commit}" for commit in commits]
    with started(names, Work(shape="nano"), tmp_path) as (there, left_out):
        assert [one.name for one in there] == names and not left_out
        answers = [one.about["versions"]["answer"] for one in there]
    assert answers == ["in the package", "beside it"]
    state = subprocess.run(
        ["git", "-C", str(contestants.ROOT), "status", "--porcelain"],
        capture_output=True,
        check=True,
        text=True,
    )
    assert state.stdout == " M benchmarks/__init__.py\n"


def test_the_files_are_gone_when_they_are_no_longer_needed(commits):
    with files_of(commits[0]) as root:
        assert (root / "rlhf_lab" / "bench" / "ours.py").is_file()
    assert not root.exists()


def test_a_commit_is_named_by_its_hash_however_it_was_given(commits):
    assert commits[1].startswith(short_hash("HEAD"))
    assert short_hash(commits[0]) == short_hash("HEAD~1")


@pytest.mark.parametrize("given", ["nowhen", "HEAD:benchmarks", "--version"])
def test_what_is_no_commit_is_refused(commits, given):
    with pytest.raises(ConfigError, match="against_commit=.* is no commit of this repository"):
        short_hash(given)


def test_it_is_this_python_that_runs(commits, tmp_path):
    start = contestants.start_of(f"ours@{commits[0]}", None, contestants.ExitStack())
    assert start.command[0] == sys.executable and start.command[-1] == "ours"
