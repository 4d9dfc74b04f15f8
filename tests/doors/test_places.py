"""Output paths that are occupied or impossible, and input paths of the wrong kind."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhf_lab.files import PAGE_MARK
from tests.doors.door import TRAIN, accepted, contents, refused, untouched

LEFT = "Use a new file"
FEW = "--steps 1 --batch-size 2"


def link(path: Path, to: str) -> None:
    path.symlink_to(to)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


def full_directory(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("mine")


OCCUPANTS: dict[str, Callable[[Path], None]] = {
    "a text": lambda path: path.write_text("mine"),
    "an empty file": lambda path: path.touch(),
    "a foreign page": lambda path: path.write_text("<!doctype html><p>mine"),
    "the mark in the middle": lambda path: path.write_text(PAGE_MARK + "mine"),
    "a directory": full_directory,
    "an empty directory": lambda path: path.mkdir(),
    "a link to a text": lambda path: link(path, "thesis.tex"),
    "a link to a page": lambda path: link(path, "ours.html"),
    "a link to nothing": lambda path: link(path, "nowhere"),
    "a link to itself": lambda path: link(path, path.name),
    "a pipe": lambda path: os.mkfifo(path),
    "a socket": unix_socket,
}
NO_FILE_FOR_A_PAGE = {
    "RUN/run.json": LEFT,
    "RUN/metrics.jsonl": LEFT,
    "RUN/samples.jsonl": LEFT,
    "RUN/checkpoints/last.safetensors": LEFT,
    "RUN/checkpoints": "is a directory",
    "RUN": "is a directory",
    "/dev/null": "is a device",
    "/dev/full": "is a device",
    "/dev/stdout": LEFT,
    "/proc/page.html": "/proc/page.html",
    "/sys/page.html": "/sys/page.html",
    "": "--out is empty",
    ".": "is a directory",
    "nowhere/page.html": "no directory nowhere",
    "thesis.tex/page.html": "no directory thesis.tex",
}
NO_DIRECTORY_FOR_A_MODEL = {
    "RUN": "already exists",
    "RUN/run.json": "already exists",
    "thesis.tex": "already exists",
    "thesis.tex/made": "thesis.tex",
    "/dev/null": "/dev/null already exists",
    "/proc/made": "Cannot write /proc/made",
    ".": "already exists",
    "": "",
    "..": "already exists",
}
MAKERS = {
    "export": "export RUN",
    "sft": f"sft --texts reel --n-texts 8 --samples 0 {FEW} --out",
    "dpo": f"dpo --pairs reel --n-pairs 8 --samples 0 {FEW} --out",
    "kto": f"kto --examples reel --n-pairs 8 --samples 0 {FEW} --out",
    "orpo": f"orpo --pairs reel --n-pairs 8 --samples 0 {FEW} --out",
    "train-reward": f"train-reward --pairs reel --n-pairs 8 {FEW} --out",
}
NO_PLACE_FOR_A_RUN = {
    "RUN": "already holds a run",
    "thesis.tex": "is a file",
    "thesis.tex/run": "cannot write thesis.tex/run",
    "/dev/null": "/dev/null is",
    "/proc/run": "cannot write /proc/run",
    "/sys/run": "cannot write /sys/run",
}
NOT_TO_BE_READ = {
    "resume thesis.tex": ("no directory thesis.tex",),
    "resume /dev/null": ("no directory /dev/null",),
    "resume empty": ("no run.json",),
    "resume RUN/checkpoints": ("no run.json",),
    "resume pipe": ("no directory pipe",),
    "report thesis.tex": ("no directory thesis.tex",),
    "report empty": ("no run.json",),
    "report ..": ("no run.json",),
    "sample empty": ("no run.json",),
    "sample ./thesis.tex": ("no model directory",),
    "sample reel-sentiment": ("reel-sentiment", "language model"),
    "export empty made": ("no run.json",),
    "export reel-nano made": ("no directory reel-nano",),
    "score good --reward-model RUN": ("RUN", "is a run"),
    "score good --reward-model ./thesis.tex": ("no model directory",),
    "score good --reward-fn learned --reward-model empty": ("empty", "train-reward"),
    "score good --reward-fn learned --reward-model reel-nano": ("reel-nano", "train-reward"),
    "sft --texts empty --out made": ("is not a file",),
    "sft --texts /dev/null --out made": ("texts=", "is not a file"),
    "sft --texts reel --out made --base-model RUN": ("RUN", "is a run", "export"),
    "dpo --pairs /dev/null --out made": ("pairs=", "is not a file"),
    "dpo --pairs RUN/samples.jsonl --out made": ("line 1", "'chosen'"),
    "kto --examples /dev/null --out made": ("examples=", "is not a file"),
    "kto --examples RUN/samples.jsonl --out made": ("line 1", "'label'"),
    "train-reward --pairs RUN/checkpoints/last.safetensors --out made": (".safetensors",),
    "train-reward --pairs reel --out made --base-model RUN": ("RUN", "is a run", "export"),
}


@pytest.fixture
def place(here: Path) -> Path:
    """`here` with a text, an earlier page, a pipe and an empty directory."""
    (here / "thesis.tex").write_text("mine")
    (here / "ours.html").write_text(f"<p>old{PAGE_MARK}")
    (here / "empty").mkdir()
    os.mkfifo(here / "pipe")
    return here


@pytest.fixture
def unchanged(place: Path) -> Iterator[None]:
    """Check that nothing changes, including directories and special files."""
    before = sorted(place.rglob("*"))
    with untouched(place):
        yield
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("occupant", OCCUPANTS)
def test_report_never_replaces_a_foreign_file(place: Path, occupant: str) -> None:
    OCCUPANTS[occupant](place / "new.html")
    before = sorted(place.rglob("*"))
    with untouched(place):
        refused(["report", "RUN", "--out", "new.html"], "new.html")
    assert sorted(place.rglob("*")) == before


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("out", NO_FILE_FOR_A_PAGE)
def test_report_rejects_an_impossible_place(out: str) -> None:
    refused(["report", "RUN", "--out", out], NO_FILE_FOR_A_PAGE[out])


@pytest.mark.parametrize("out", ["new.html", "new.txt", "empty/new", "-", "--out=-x.html"])
def test_report_writes_a_new_file_only(place: Path, out: str) -> None:
    option, path = ([out], "-x.html") if out.startswith("--") else (["--out", out], out)
    before = contents(place)
    assert accepted(["report", "RUN", *option]).out == f"written: {path}\n"
    after = contents(place)
    assert after.keys() - before.keys() == {path} and before.items() <= after.items()
    assert (place / path).read_text().startswith("<!DOCTYPE html>")


def test_report_replaces_its_earlier_page_only(place: Path) -> None:
    link(place / ".ours.html.partial", "thesis.tex")
    accepted(["report", "RUN", "--out", "ours.html"])
    assert (place / "thesis.tex").read_text() == "mine"
    page = (place / "ours.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and page.endswith(PAGE_MARK)


def test_directory_in_the_place_of_a_draft_is_rejected(place: Path) -> None:
    full_directory(place / ".ours.html.partial")
    with untouched(place):
        refused(["report", "RUN", "--out", "ours.html"], "ours.html", "is a directory", "Remove it")


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    ("command", "out"),
    [("export", out) for out in NO_DIRECTORY_FOR_A_MODEL] + [(name, "RUN") for name in MAKERS],
)
def test_models_are_not_written_over_anything(command: str, out: str) -> None:
    refused([*MAKERS[command].split(), out], NO_DIRECTORY_FOR_A_MODEL[out])


@pytest.mark.parametrize("occupant", OCCUPANTS)
def test_export_never_replaces_anything(place: Path, occupant: str) -> None:
    OCCUPANTS[occupant](place / "made")
    before = sorted(place.rglob("*"))
    if occupant == "an empty directory":
        accepted([*MAKERS["export"].split(), "made"])
        assert (place / "made" / "config.json").is_file()
        return
    with untouched(place):
        refused([*MAKERS["export"].split(), "made"], "made ", "Choose a new directory")
    assert sorted(place.rglob("*")) == before


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("out", NO_PLACE_FOR_A_RUN)
def test_train_rejects_an_impossible_place(out: str) -> None:
    refused([*TRAIN, "--out", out], NO_PLACE_FOR_A_RUN[out])


@pytest.mark.parametrize("occupant", OCCUPANTS)
def test_train_never_replaces_anything(place: Path, occupant: str) -> None:
    OCCUPANTS[occupant](place / "made")
    if occupant in ("a directory", "an empty directory"):
        accepted([*TRAIN, "--out", "made"])
        assert (place / "made" / "run.json").is_file()
        assert occupant != "a directory" or (place / "made" / "thesis.tex").read_text() == "mine"
        return
    before = sorted(place.rglob("*"))
    with untouched(place):
        refused([*TRAIN, "--out", "made"], "made", "hoose another --out")
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("file", ["samples.jsonl", "checkpoints", "run.json", "metrics.jsonl"])
def test_train_rejects_a_directory_with_a_runs_file(place: Path, file: str) -> None:
    full_directory(place / "made")
    (place / "made" / file).write_text("mine")
    with untouched(place):
        refused([*TRAIN, "--out", "made"], "made", "--out")


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("command", NOT_TO_BE_READ)
def test_commands_reject_the_wrong_kind_of_place(command: str) -> None:
    refused(command.split(), *NOT_TO_BE_READ[command])
