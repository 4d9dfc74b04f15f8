"""`python -m tools.reel`: what it prints of Reel's models, and what it refuses."""

import re

import pytest
import torch

from rlhf_lab.organism import weights_dir
from rlhf_lab.organism.bundled import LANGUAGE_MODELS
from tools.reel import __main__ as commands


@pytest.mark.slow
def test_the_check_prints_a_row_per_check(capsys):
    assert commands.main(["check", "--reviews", "300"]) == 0
    said = capsys.readouterr().out
    assert len(re.findall(r" yes ", said)) == 19 and " NO " not in said


@pytest.mark.slow
def test_the_check_reports_what_is_read_in_each_model_with_intervals(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(commands, "run_checks", lambda reviews: [])
    assert commands.main(["check", "--reviews", "300"]) == 0
    header, *rows = capsys.readouterr().out.strip().splitlines()[-12:]
    assert header.split()[-4:] == [*LANGUAGE_MODELS, "mean"]
    assert len(rows) == 11
    for row in rows:
        *cells, mean = re.findall(r"-?\d\.\d{3}", row)
        values = [float(value) for value in cells[::3]]
        assert len(values) == 3 and float(mean) == pytest.approx(sum(values) / 3, abs=1.1e-3)


def test_training_says_whether_the_weights_are_those_that_are_shipped(
    capsys, monkeypatch, tmp_path
):
    asked = []

    def rebuild(out):
        asked.append(out)
        shipped = weights_dir("reel-nano")
        return {"reel-nano": commands.Trained(torch.nn.Identity(), shipped, torch.zeros(1))}

    monkeypatch.setattr(commands, "rebuild", rebuild)
    assert commands.main(["train", "--out", str(tmp_path)]) == 0
    assert "bit for bit the shipped weights" in capsys.readouterr().out
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
