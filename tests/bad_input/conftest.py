"""A run to spoil, a working directory, and the weights of an undisturbed run."""

import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_lab.training import RLHFTrainer
from tests.bad_input.command_outcome import settings
from tests.training.recorded_runs import copy_weights

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder: nearly all train, and the type checks are part of them."""
    for item in items:
        if item.path.is_relative_to(HERE) and not item.get_closest_marker("slow"):
            item.add_marker("slow")
            item.add_marker("typed")


@pytest.fixture(scope="session")
def half_done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two of three phases, to be copied."""
    args = settings(total_phases=3, warmup_steps=1)
    trainer = RLHFTrainer(args, out=tmp_path_factory.mktemp("half") / "RUN")
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


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def count_e(texts: list[str]) -> torch.Tensor:
    """A reward that differs between texts: a tenth of the number of e's."""
    return torch.tensor([text.count("e") / 10 for text in texts])


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights after two phases with the reward `count_e` and nothing else."""
    out = tmp_path_factory.mktemp("plain") / "run"
    trainer = RLHFTrainer(settings(), out=out, reward_fn=count_e)
    trainer.train()
    return copy_weights(trainer.policy)


@pytest.fixture(scope="session")
def idle() -> RLHFTrainer:
    """A trainer that never starts."""
    return RLHFTrainer(settings())
