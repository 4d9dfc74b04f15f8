"""Atomic writes: whole files with the usual mode, which replace only files of this package."""

import os
import stat
from pathlib import Path

import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.data_sources import read_rows
from rlhf_lab.diffing.activation_store import ActivationStore, TokenPlaces
from rlhf_lab.errors import LabError
from rlhf_lab.files import expand_home
from rlhf_lab.models.export import new_directory
from rlhf_lab.models.peft_format import read_adapter
from rlhf_lab.training.checkpoint import save_checkpoint


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


def test_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with new_directory(expand_home("~/model")) as partial:
        (partial / "w").touch()
    assert str(expand_home("~nouser/model")) == "~nouser/model"
    (tmp_path / "s.json").write_text('{"seed": 3}')
    assert RLHFArgs.from_file("~/s.json").seed == 3
    (tmp_path / "p.txt").write_text("this movie")
    assert len(read_rows("~/p.txt", "prompts", "prompt")) == 1
    store = ActivationStore(1, ["base"])
    store.add({"base": torch.ones(1, 2)}, TokenPlaces(*[torch.zeros(1, dtype=torch.long)] * 3))
    store.save("~/a.safetensors")
    assert len(ActivationStore.load("~/a.safetensors")) == 1
    with pytest.raises(LabError, match=r"adapter_path='~/model'.*/model/adapter_config"):
        read_adapter(Path("~/model"), "adapter_path='~/model'")
    assert not (tmp_path / "~").exists()
