"""Runs that are moved while they are trained, and names with two meanings."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf_lab import RLHFTrainer
from tests.bad_input.command_outcome import TRAIN, accepted, refuses, rejected, settings

pytestmark = pytest.mark.usefixtures("no_type_checks")
FIT = ["--steps", "2", "--no-show-progress"]


def test_matrix_named_twice_has_one_adapter(here: Path) -> None:
    for out, targets in {"once": "W_Q", "twice": "W_Q,W_Q"}.items():
        accepted([*TRAIN, "--lora-rank", 2, "--lora-targets", targets, "--out", out])
    once, twice = (load_file(f"{out}/checkpoints/last.safetensors") for out in ("once", "twice"))
    assert once.keys() == twice.keys() and all(torch.equal(once[k], twice[k]) for k in once)


def test_path_selects_a_directory_with_a_bundled_name(here: Path, gpt2_dir: Path) -> None:
    shutil.copytree(gpt2_dir, "reel-nano")
    outcome = accepted(["sample", "./reel-nano", "--prompt", "w1 w2", "-n", 1, "--gen-len", 4])
    assert outcome.out.startswith("w1 w2")


def test_reward_model_is_no_policy(here: Path) -> None:
    accepted(["train-reward", "--pairs", "reel", "--n-pairs", 40, "--out", "rewarder", *FIT])
    rejected(["sample", "rewarder", "-n", 1], "reward model")


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
