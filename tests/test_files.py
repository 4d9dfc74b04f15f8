"""Atomic writes: whole files with the usual mode, which replace only files of this package."""

import os
import stat
from pathlib import Path

import pytest

from rlhf_lab.errors import LabError, RunError
from rlhf_lab.files import PAGE_MARK, write_marked
from rlhf_lab.models.export import new_directory
from rlhf_lab.training import RunDir
from rlhf_lab.training.checkpoint import save_checkpoint


def make_link(path: Path) -> None:
    path.with_name("target").write_text("mine")
    path.symlink_to(path.with_name("target"))


OTHERS = {
    "a directory": lambda path: (path / "below").mkdir(parents=True),
    "a link": make_link,
    "a pipe": os.mkfifo,
}
FOREIGN = [b"", b"<!DOCTYPE html>\n<title>rlhf_lab</title>\n", PAGE_MARK.encode() + b"and more"]


def state(path: Path) -> tuple:
    """Return kind, content and inode, without following links."""
    mode = path.lstat().st_mode
    return mode, path.read_bytes() if stat.S_ISREG(mode) else None, path.lstat().st_ino


@pytest.mark.parametrize("kind", OTHERS)
def test_files_of_a_run_replace_regular_files_only(tmp_path, kind):
    directory = RunDir.create(tmp_path / "run")
    names = "run.json", "metrics.jsonl", "checkpoints/last.safetensors", "page.html"
    paths = [directory.path / name for name in names]
    for path in paths:
        (path.parent / "target").unlink(missing_ok=True)
        OTHERS[kind](path)
    before = [state(path) for path in paths]
    for write in (
        lambda: directory.write_info({"args": {}}),
        lambda: directory.append("metrics.jsonl", [{"phase": 0}]),
        lambda: save_checkpoint(paths[2], {}, {}),
        lambda: write_marked(paths[3], "x"),
    ):
        with pytest.raises(RunError, match=kind):
            write()
    assert [state(path) for path in paths] == before


@pytest.mark.parametrize("content", FOREIGN)
def test_page_replaces_marked_files_only(tmp_path, content):
    path = tmp_path / "page.html"
    path.write_bytes(content)
    before = state(path)
    with pytest.raises(RunError, match="did not write"):
        write_marked(path, "x")
    assert state(path) == before
    for text in ("a", "b"):
        write_marked(tmp_path / "ours.html", text)
    assert (tmp_path / "ours.html").read_text() == "b" + PAGE_MARK
    with pytest.raises(RunError, match="cannot write"):
        write_marked(tmp_path / "nowhere" / "page.html", "x")


def test_links_are_not_followed(tmp_path):
    make_link(tmp_path / "out")
    with pytest.raises(LabError, match="already exists"), new_directory(tmp_path / "out"):
        pytest.fail("the work must not begin")
    (tmp_path / ".page.html.partial").symlink_to(tmp_path / "target")
    write_marked(tmp_path / "page.html", "x")
    assert (tmp_path / "target").read_text() == "mine"
    assert not (tmp_path / "page.html").is_symlink() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_written_files_have_the_mode_of_new_files(tmp_path, umask, mode):
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
