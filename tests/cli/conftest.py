"""Shares runs that the tests of commands read, each made when a test first uses it."""

import warnings
from pathlib import Path

import pytest

from tests.bad_input.command_outcome import Outcome, accepted

SMALL = "--total-phases 2 --batch-size 16 --num-minibatches 2 --warmup-steps 1 --gen-len 26".split()


@pytest.fixture(autouse=True)
def isolated_process_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what a command sets for its whole process."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    """A finished run of two phases, and what the command printed."""
    out = tmp_path_factory.mktemp("cli") / "demo"
    return accepted(["train", *SMALL, "--seed", "1", "--out", out]), out
