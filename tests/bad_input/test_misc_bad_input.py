"""Runs that change while a trainer is away, names with two meanings, and odd files of a learner."""

import contextlib
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_lab import RLHFTrainer
from rlhf_lab.course import CheckNotPassed, check
from rlhf_lab.errors import LabError
from tests.bad_input.command_outcome import TRAIN, accepted, refuses, rejected, run, settings

pytestmark = pytest.mark.usefixtures("no_type_checks")
FIT = ["--steps", "2", "--no-show-progress"]


@pytest.fixture
def reward_model(here: Path) -> Path:
    """A reward model after two steps."""
    accepted(["train-reward", "--pairs", "reel", "--n-pairs", 40, "--out", "rewarder", *FIT])
    return Path("rewarder")


def test_matrix_named_twice_has_one_adapter(here: Path) -> None:
    for out, targets in {"once": "W_Q", "twice": "W_Q,W_Q"}.items():
        accepted([*TRAIN, "--lora-rank", 2, "--lora-targets", targets, "--out", out])
    once, twice = (load_file(f"{out}/checkpoints/last.safetensors") for out in ("once", "twice"))
    assert once.keys() == twice.keys() and all(torch.equal(once[k], twice[k]) for k in once)


def test_path_selects_a_directory_with_a_bundled_name(here: Path, gpt2_dir: Path) -> None:
    shutil.copytree(gpt2_dir, "reel-nano")
    outcome = accepted(["sample", "./reel-nano", "--prompt", "w1 w2", "-n", 1, "--gen-len", 4])
    assert outcome.out.startswith("w1 w2")


def test_reward_model_is_no_policy(reward_model: Path) -> None:
    rejected(["sample", reward_model, "-n", 1], "reward model")


def test_second_trainer_of_a_new_run_is_rejected(here: Path) -> None:
    first = RLHFTrainer(settings(), out="made")
    second = RLHFTrainer(settings(seed=2), out="made")
    first.run_phase()
    refuses(second.run_phase, "made")
    first.run_phase()
    assert json.loads(Path("made/run.json").read_text())["args"]["seed"] == 1
    assert len(Path("made/metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_run_deleted_or_moved_during_training_raises(here: Path, how: str) -> None:
    trainer = RLHFTrainer(settings(total_phases=4), out="made")
    trainer.run_phase()
    trainer.run_phase()
    if how == "deleted":
        while Path("made").exists():  # the newest checkpoint may still be written
            shutil.rmtree("made", ignore_errors=True)
    else:
        Path("made").rename("moved")
    refuses(trainer.train, "made")


def test_report_of_a_run_without_phases(here: Path) -> None:
    RLHFTrainer(settings(), out="made").start()
    accepted(["report", "made"])
    assert "<html" in Path("made/report.html").read_text()


@pytest.mark.parametrize("thing", [None, "masked_mean", print], ids=repr)
def test_check_rejects_other_objects(thing: Any) -> None:
    with pytest.raises(ValueError, match="exercise"):
        check(thing)


def test_damaged_progress_file_is_kept(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = here / ".local" / "share" / "rlhf_lab" / "progress.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"masked_mean": {"checks": 12, "sta')
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)

    def masked_mean(*arguments: Any, **options: Any) -> None: ...

    run(["progress"])
    with contextlib.suppress(CheckNotPassed, LabError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(masked_mean)
    texts = [path.read_text() for path in path.parent.iterdir()]
    assert any('{"masked_mean": {"checks": 12, "sta' in text for text in texts)
