"""Files are written whole, may be read by others, and take nothing's place but their own."""

import os
import stat
from pathlib import Path

import pytest

from rlhf_lab.__main__ import main
from rlhf_lab.errors import LabError, RunError
from rlhf_lab.files import PAGE_MARK, beside, write_marked
from rlhf_lab.models.export import new_directory
from rlhf_lab.training import RunDir
from rlhf_lab.training.checkpoint import save_checkpoint
from rlhf_lab.views.html import Html


def make_directory(path: Path) -> None:
    (path / "below").mkdir(parents=True)


def make_link(path: Path) -> None:
    path.with_name("target").write_text("mine")
    path.symlink_to(path.with_name("target"))


def make_dangling_link(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


OTHERS = {
    "directory": (make_directory, "a directory"),
    "link": (make_link, "a link"),
    "dangling link": (make_dangling_link, "a link"),
    "pipe": (os.mkfifo, "a pipe"),
}
FOREIGN = {
    "thesis.tex": b"\\documentclass{article}",
    "empty.html": b"",
    "page.html": b"<!DOCTYPE html>\n<title>of another: rlhf_lab</title>\n",
    "cut.html": PAGE_MARK.encode() + b"and more",
    "weights.safetensors": bytes(range(256)) * 9,
}


def state(path: Path) -> tuple:
    """What is at a place, links not followed."""
    mode = path.lstat().st_mode
    return mode, path.read_bytes() if stat.S_ISREG(mode) else None, path.lstat().st_ino


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = RunDir.create(tmp_path / "run")
    args = {"base_model": "m", "reward_fn": "zero", "total_phases": 1}
    directory.write_info({"args": args, "status": "running"})
    return directory.path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one sentence with which the command line refuses."""
    assert main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    return said.err


@pytest.mark.parametrize("kind", OTHERS)
def test_a_report_takes_the_place_of_no_directory_link_or_pipe(tmp_path, run, capsys, kind):
    make, name = OTHERS[kind]
    place = tmp_path / "place.html"
    make(place)
    before = state(place)
    sentence = refused(capsys, "report", run, "--out", place)
    assert str(place) in sentence and name in sentence
    assert state(place) == before
    assert (kind != "link") or (tmp_path / "target").read_text() == "mine"


@pytest.mark.parametrize("name", FOREIGN)
def test_a_report_takes_the_place_of_no_foreign_file(tmp_path, run, capsys, name):
    place = tmp_path / name
    place.write_bytes(FOREIGN[name])
    before = state(place)
    assert str(place) in refused(capsys, "report", run, "--out", place)
    assert state(place) == before


def test_a_report_takes_the_place_of_no_file_of_the_run(run, capsys):
    before = state(run / "run.json")
    assert "did not write there" in refused(capsys, "report", run, "--out", run / "run.json")
    assert state(run / "run.json") == before


def test_a_report_takes_the_place_of_an_earlier_one(run, capsys):
    for _ in range(2):
        assert main(["report", str(run)]) == 0
    assert (run / "report.html").read_text(encoding="utf-8").endswith(f"</html>\n{PAGE_MARK}")
    assert not list(run.glob(".*"))


@pytest.mark.skipif(not Path("/dev/null").is_char_device(), reason="no devices here")
def test_a_device_is_no_place_for_a_page():
    """Asked of the writer alone: a fault must not replace the device of the machine."""
    with pytest.raises(RunError, match="a device"), beside(Path("/dev/null")):
        pytest.fail("nothing must be written")  # before the rename


@pytest.mark.parametrize("kind", OTHERS)
def test_no_file_of_a_run_takes_the_place_of_anything_else(run, kind):
    """The info, what is appended, and checkpoints."""
    make, name = OTHERS[kind]
    directory = RunDir(run)
    (run / "run.json").unlink()
    places = [run / "run.json", run / "metrics.jsonl", run / "checkpoints" / "last.safetensors"]
    for place in places:
        (place.parent / "target").unlink(missing_ok=True)
        make(place)
    before = [state(place) for place in places]
    for write in (
        lambda: directory.write_info({"args": {}}),
        lambda: directory.append("metrics.jsonl", [{"phase": 0}]),
        lambda: save_checkpoint(places[2], {}, {}),
    ):
        with pytest.raises(RunError, match=name):
            write()
    assert [state(place) for place in places] == before


def test_a_fragment_and_a_page_are_saved_over_their_own_kind_only(tmp_path):
    (tmp_path / "mine.html").write_text("<p>mine</p>")
    with pytest.raises(RunError, match="did not write"):
        Html("<p>x</p>").save(tmp_path / "mine.html")
    assert (tmp_path / "mine.html").read_text() == "<p>mine</p>"
    for text in ("a", "b"):
        Html(text).save(tmp_path / "page.html")
    assert "\nb\n" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("kind", ["link", "dangling link"])
def test_a_model_is_not_written_through_a_link(tmp_path, kind):
    OTHERS[kind][0](tmp_path / "out")
    with pytest.raises(LabError, match="already exists"), new_directory(tmp_path / "out"):
        pytest.fail("the work must not begin")


def test_a_link_in_the_place_of_the_draft_is_not_followed(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".page.html.partial").symlink_to(tmp_path / "mine")
    write_marked(tmp_path / "page.html", "x")
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / "page.html").is_symlink()


def test_a_place_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(RunError, match="cannot write"):
        write_marked(tmp_path / "nowhere" / "page.html", "x")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_what_is_written_has_the_mode_of_any_new_file(tmp_path, umask, mode):
    """safetensors makes its files 0600, whatever the umask."""
    before = os.umask(umask)
    try:
        save_checkpoint(tmp_path / "c.safetensors", {}, {})
        with new_directory(tmp_path / "model") as partial:
            (partial / "w").touch(0o600)
    finally:
        os.umask(before)
    for path in (tmp_path / "c.safetensors", tmp_path / "model" / "w"):
        assert stat.S_IMODE(path.stat().st_mode) == mode
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["w"]
