"""Output paths that are occupied or impossible, and input paths of the wrong kind."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_lab.course.progress_file import progress_path
from rlhf_lab.files import PAGE_MARK
from rlhf_lab.rewards.model import HEAD_FILE
from tests.bad_input.command_outcome import TRAIN, accepted, contents, rejected, untouched


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


def full_directory(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("mine")


OCCUPANTS: dict[str, Callable[[Path], object]] = {
    "a text": lambda path: path.write_text("mine"),
    "a foreign page": lambda path: path.write_text("<!doctype html><p>mine"),
    "the mark in the middle": lambda path: path.write_text(PAGE_MARK + "mine"),
    "a directory": full_directory,
    "an empty directory": lambda path: path.mkdir(),
    "a link to a text": lambda path: path.symlink_to("thesis.tex"),
    "a link to a page": lambda path: path.symlink_to("ours.html"),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a pipe": lambda path: os.mkfifo(path),
    "a socket": unix_socket,
}
FEW = "--steps 1 --batch-size 2"
REPORT, EXPORT, SFT = "report RUN --out", "export RUN", f"sft --texts reel --n-texts 8 {FEW} --out"
TRAINING = " ".join([*TRAIN, "--out"])
REJECTED = {
    f"{REPORT} RUN/checkpoints/last.safetensors": "Use a new file",
    f"{REPORT} /dev/null": "pipe or device",
    f"{REPORT} /proc/page.html": "/proc/page.html",
    f"{REPORT} nowhere/page.html": "cannot write nowhere/page.html",
    f"{EXPORT} /proc/made": "Cannot write /proc/made",
    f"train-reward --pairs reel {FEW} --out thesis.tex/a/b --base-model no": "Cannot write thesis",
    f"{TRAINING} RUN": "already holds a run",
    f"{TRAINING} /dev/null": "/dev/null is",
    f"{TRAINING} model": "model/config.json exists without a run",
    f"{TRAINING} made --reference-model model": "'model' is a reward model",
    f"{SFT} made --base-model model": "'model' is a reward model",
    f"{TRAINING} /proc/run": "No such file or directory. Make room or choose another path",
    # inputs
    "resume pipe": "pipe has no run.json",
    "report empty": "of a run (an adapter is for `train --adapter-path`)",
    "sample ./thesis.tex": "no model directory",
    "export reel-nano made": "reel-nano has no run.json",
    "score good --reward-model RUN": "is a run",
    "sft --texts /dev/null --out made": "is not a file",
    "kto --examples RUN/samples.jsonl --out made": "'label'",
    "train-reward --pairs RUN/checkpoints/last.safetensors --out made": ".safetensors",
}


@pytest.fixture
def place(here: Path) -> Path:
    """`here` with a text, an earlier page, a pipe and an empty directory."""
    (here / "thesis.tex").write_text("mine")
    (here / "ours.html").write_text(f"<p>old{PAGE_MARK}")
    (here / "empty").mkdir()
    (here / "model").mkdir()
    for name in ("config.json", HEAD_FILE):
        (here / "model" / name).touch()
    os.mkfifo(here / "pipe")
    return here


@pytest.mark.parametrize("command", REJECTED)
def test_command_rejects_path(place: Path, command: str) -> None:
    with untouched(place):
        rejected(command.split(), REJECTED[command])


@pytest.mark.parametrize("occupant", OCCUPANTS)
def test_nothing_foreign_is_replaced(place: Path, occupant: str) -> None:
    OCCUPANTS[occupant](place / "made")
    is_directory = occupant.endswith("directory")
    with untouched(place):
        rejected([*REPORT.split(), "made"], "made")
        if occupant != "an empty directory":
            rejected([*EXPORT.split(), "made"], "made ", "Choose a new directory")
        if not is_directory:
            rejected([*TRAINING.split(), "made"], "made", "hoose another")
    if is_directory:
        accepted([*TRAINING.split(), "made"])
        assert (place / "made" / "run.json").is_file()
        assert occupant != "a directory" or (place / "made" / "thesis.tex").read_text() == "mine"


@pytest.mark.parametrize("out", ["new.html", "empty/new", "-", "--out=-x.html"])
def test_report_writes_one_new_file(place: Path, out: str) -> None:
    option, path = ([out], "-x.html") if out.startswith("--") else (["--out", out], out)
    before = contents(place)
    assert accepted(["report", "RUN", *option]).out == f"written: {path}\n"
    after = contents(place)
    assert after.keys() - before.keys() == {path} and before.items() <= after.items()


def test_tilde_is_the_home_directory(place: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(place / "empty"))
    accepted(["report", "RUN", "--out", "~/new.html"])
    assert (place / "empty" / "new.html").is_file() and not (place / "~").exists()
    (place / "empty" / "schema.json").write_text('{"type": "object"}')
    score = ["score", "{}", "--reward-fn", "json_schema:~/schema.json"]
    assert accepted(score).out == "1.0000\t{}\n"
    (place / "empty" / "model").mkdir()
    (place / "empty" / "model" / HEAD_FILE).touch()
    rejected([*TRAIN, "--base-model", "~/model"], "reward model")
    rejected(["score", "a", "--reward-fn", "learned", "--reward-model", "~/model"], "config.json")
    monkeypatch.setenv("RLHF_LAB_PROGRESS", "~/progress.json")
    assert progress_path() == place / "empty" / "progress.json"


def test_report_replaces_its_earlier_page_only(place: Path) -> None:
    (place / ".ours.html.partial").symlink_to("thesis.tex")
    accepted(["report", "RUN", "--out", "ours.html"])
    assert (place / "thesis.tex").read_text() == "mine"
    page = (place / "ours.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and page.endswith(PAGE_MARK)
    full_directory(place / ".ours.html.partial")
    with untouched(place):
        rejected([*REPORT.split(), "ours.html"], "ours.html", "is a directory", "Remove it")
