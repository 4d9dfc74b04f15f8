"""The table of what the check says to the wrong answers of a file."""

import json
from pathlib import Path

import pytest

from tools.course import answers
from tools.course.__main__ import main

ROOT = Path(__file__).parents[2]
FILE = """\
ANSWERS = {
    "sequence_sum": [
        ("a mean", "def sequence_sum(x, mask=None):\\n    return x.mean(-1)"),
        ("no function", "sequence = 1"),
    ],
}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with two wrong answers."""
    path = tmp_path / "answers.py"
    path.write_text(FILE, encoding="utf-8")
    return path


def test_answers_are_tried_told_counted_and_keep_what_a_person_judged(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(answers.CHECKED, "1")
    judged = tmp_path / "judged.jsonl"
    command = ["try", str(file), "--judged", str(judged), "--root", str(ROOT)]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "sequence_sum, a mean: differs; this is the mean of each sequence" in said
    assert "sequence_sum, no function: no answer; KeyError" in said
    lines = [json.loads(line) for line in judged.read_text().splitlines()]
    assert [line["judged"] for line in lines] == ["", ""]
    lines[0]["judged"] = "named"
    judged.write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = answers.with_judgements([answers.Tried(**{**lines[0], "judged": ""})], judged)
    changed = answers.with_judgements([answers.Tried(**{**lines[0], "said": "else"})], judged)
    assert (kept[0].judged, changed[0].judged) == ("named", "")


def test_files_that_cannot_be_tried_are_refused(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.py"
    with pytest.raises(answers.LoadError, match="is no file"):
        answers.read_answers(nothing)
    nothing.write_text("x = 1")
    with pytest.raises(answers.LoadError, match="binds no dict ANSWERS"):
        answers.read_answers(nothing)
    nothing.write_text("ANSWERS = {'len': []}")
    with pytest.raises(answers.ConfigError, match="answers 'len', which is no exercise"):
        answers.read_answers(nothing)
