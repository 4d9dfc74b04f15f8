"""Small Reel runs for the tests of training."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from rlhf_lab.config import RLHFArgs
from rlhf_lab.models import load_model
from rlhf_lab.rewards import RewardModel
from rlhf_lab.training import RLHFTrainer
from tests.small_runs import SMALL
from tests.tiny_models import tiny_chat
from tests.training.recorded_runs import (
    CONFIGURATIONS,
    MakeRun,
    RecordedRun,
    read_files,
    record,
    train_partly,
)


@pytest.fixture(scope="session", autouse=True)
def trackio_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set the folder of trackio, which reads it on import, before any test imports it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        yield


@pytest.fixture(scope="session")
def reel_args() -> Callable[..., RLHFArgs]:
    def make(**overrides: Any) -> RLHFArgs:
        return RLHFArgs(**(SMALL | overrides))

    return make


@pytest.fixture
def make_trainer(tmp_path: Path, reel_args: Callable[..., RLHFArgs]) -> Callable[..., RLHFTrainer]:
    """Makes trainers that write to fresh directories, with custom components in `parts`."""
    made = []

    def make(parts: dict[str, Any] | None = None, **overrides: Any) -> RLHFTrainer:
        made.append(tmp_path / f"run{len(made)}")
        return RLHFTrainer(reel_args(**overrides), out=made[-1], **(parts or {}))

    return make


@pytest.fixture(scope="session")
def reward_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained reward model, with scores of mean 0.5 and standard deviation 2."""
    model = RewardModel(load_model("reel-nano"), seed=3)
    model.set_normalization(Tensor([-1.5, 2.5]))
    directory = tmp_path_factory.mktemp("reward") / "model"
    model.save(directory, "reel-nano", {})
    return directory


@pytest.fixture(scope="session")
def make_configured(
    tmp_path_factory: pytest.TempPathFactory, reel_args: Callable[..., RLHFArgs], reward_dir: Path
) -> Callable[..., RLHFTrainer]:
    """Makes a trainer of a configuration, with changed settings, in a fresh directory."""

    @cache
    def chat_dir() -> Path:
        return tiny_chat(tmp_path_factory.mktemp("chat") / "model")

    def make(name: str, **changes: Any) -> RLHFTrainer:
        settings, make_parts, *_ = CONFIGURATIONS[name]
        paths = {"REWARD": lambda: str(reward_dir), "CHAT": lambda: str(chat_dir())}
        settings = {
            key: paths[value]() if isinstance(value, str) and value in paths else value
            for key, value in settings.items()
        }
        out = tmp_path_factory.mktemp("configured") / "run"
        return RLHFTrainer(reel_args(**settings | changes), out=out, **make_parts())

    return make


@pytest.fixture(scope="session")
def runs(make_configured: Callable[..., RLHFTrainer]) -> MakeRun:
    """The recorded run of a configuration, trained when a test first uses it."""
    return cache(lambda name: RecordedRun(make_configured(name), CONFIGURATIONS[name].hook))


@pytest.fixture(scope="session")
def resumed(make_configured: Callable[..., RLHFTrainer]) -> Callable[[str], RLHFTrainer]:
    """A run of a configuration that was interrupted, and resumed in another trainer."""

    @cache
    def resume(name: str) -> RLHFTrainer:
        _, make_parts, stop_after, *_ = CONFIGURATIONS[name]
        path = train_partly(record(make_configured(name)), stop_after)
        files = read_files(path)
        second = record(RLHFTrainer.resume(path, **make_parts()))
        assert read_files(path) == files  # until the next phase begins
        assert second.phase == stop_after - stop_after % second.args.save_every
        second.train()
        return second

    return resume
