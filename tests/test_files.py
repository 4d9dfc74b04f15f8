"""Atomic writes: whole files with the usual mode, which replace only files of this package."""

import os
import stat

import pytest

from rlhf_lab.errors import LabError
from rlhf_lab.files import write_marked
from rlhf_lab.models.export import new_directory
from rlhf_lab.training.checkpoint import save_checkpoint


def test_links_are_not_followed(tmp_path):
    (tmp_path / "target").write_text("mine")
    (tmp_path / "out").symlink_to(tmp_path / "target")
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
