"""Shares a run to spoil, and a directory to do it in."""

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_lab.config import RLHFArgs
from rlhf_lab.training import RLHFTrainer


@pytest.fixture(scope="session")
def half_done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two of three phases, to be copied; nobody trains it any more."""
    args = RLHFArgs(
        preset="reel", total_phases=3, batch_size=16, num_minibatches=2, warmup_steps=1, gen_len=8
    )
    trainer = RLHFTrainer(args, out=tmp_path_factory.mktemp("doors") / "RUN")
    for phase in trainer:
        if phase.phase == 1:
            trainer.request_stop()
    return trainer.run.path


@pytest.fixture
def here(half_done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a copy of `half_done` named RUN."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(half_done, tmp_path / "RUN")
    return tmp_path


@pytest.fixture(autouse=True)
def devices_stay() -> Iterator[None]:
    """Tests that run as root could replace a device; none may."""
    yield
    assert all(stat.S_ISCHR(os.stat(f"/dev/{name}").st_mode) for name in ("null", "zero", "full"))
