"""`python -m tools.reel`: what it prints of Reel's models, and what it refuses."""

import re

import pytest
import torch

from rlhf_lab.organism import weights_dir
from tools.reel import __main__ as commands
from tools.reel.train import Trained


@pytest.mark.slow
def test_the_check_prints_a_row_per_check(capsys):
    assert commands.main(["check", "--reviews", "300"]) == 0
    said = capsys.readouterr().out
    assert len(re.findall(r" yes ", said)) == 11 and " NO " not in said


def test_training_says_whether_the_weights_are_those_that_are_shipped(
    capsys, monkeypatch, tmp_path
):
    asked = []

    def rebuild(out):
        asked.append(out)
        shipped = weights_dir("reel-nano")
        return {"reel-nano": Trained(torch.nn.Identity(), shipped, torch.zeros(1))}

    monkeypatch.setattr(commands, "rebuild", rebuild)
    assert commands.main(["train", "--out", str(tmp_path)]) == 0
    assert "bitwise identical with the shipped weights" in capsys.readouterr().out
    assert asked == [tmp_path]


@pytest.mark.parametrize("command", ["train", "check"])
def test_help_names_the_command_and_its_option(command, capsys):
    with pytest.raises(SystemExit):
        commands.main([command, "--help"])
    said = capsys.readouterr().out
    assert f"usage: tools.reel {command}" in said
    assert {"train": "--out", "check": "--reviews"}[command] in said


MISTAKES = {
    "too_few": (["check", "--reviews", "0"], ("n_reviews is 0", "20 or more")),
    "unknown": (["mend"], ("mend",)),
    "no_number": (["check", "--reviews", "many"], ("--reviews", "many")),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_answered_in_one_sentence(case, capsys):
    arguments, words = MISTAKES[case]
    assert commands.main(arguments) == 2
    said = capsys.readouterr()
    (line,) = said.err.strip().splitlines()
    assert said.out == "" and line.startswith("tools.reel: ")
    assert all(word in line for word in words), line
