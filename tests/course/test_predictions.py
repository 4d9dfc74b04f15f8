"""Predictions are checked when they are made, and the first one counts."""

import math

import pytest
import torch

from rlhf_lab.course import Predictions
from rlhf_lab.course.display import LessonError


@pytest.mark.parametrize(
    ("written", "among", "expected"),
    [
        ("38/9", ["38 / 9", "38 / 12"], "38 / 9"),
        (4.2222, ["38 / 9", "38 / 12"], "38 / 9"),
        ("6", range(7), 6),
        (" UP ", ["up", "down"], "up"),
        ("'yes'", ["yes", "no"], "yes"),
        (..., ["yes", "no"], None),
        ("a sentence", None, "a sentence"),
    ],
)
def test_guess_returns_the_matching_choice(written, among, expected) -> None:
    assert Predictions().guess(written, among) == expected


@pytest.mark.parametrize(
    ("written", "among", "message"),
    [
        ("half", ["0.5", "1.0"], "Use one of: '0.5', '1.0'"),
        (7, range(7), "the integers from 0 to 6"),
        ("38 / 0", ["38 / 9"], "is not a choice"),
    ],
)
def test_what_is_no_choice_is_refused_with_the_choices(written, among, message) -> None:
    with pytest.raises(LessonError, match=message) as error:
        Predictions().guess(written, among)
    assert error.value._render_traceback_() == [str(error.value)]


def test_the_first_prediction_is_kept(capsys: pytest.CaptureFixture) -> None:
    predictions = Predictions()
    predictions.compare("it goes", "up", "down")
    assert "but you predicted up" in capsys.readouterr().out
    predictions.compare("it goes", "down", "down")
    out = capsys.readouterr().out
    assert "you predicted up" in out and "your first prediction is kept" in out
    predictions.compare("later", ..., "down")
    assert "you made no prediction" in capsys.readouterr().out
    predictions.compare("later", "down", "down")
    assert "does not count" in " ".join(capsys.readouterr().out.split())
    predictions.show()
    shown = capsys.readouterr().out
    assert "surprise" in shown and "✓" not in shown


def test_compare_accepts_each_of_several_results(capsys: pytest.CaptureFixture) -> None:
    for predicted, found in (("6", 6), ("Yes", "yes"), ("adj 3", ("adj 3", "i"))):
        Predictions().compare("it reads", predicted, found)
        assert "as you predicted" in capsys.readouterr().out
    Predictions().compare("it reads", "a", ("b", "c"))
    assert "but you predicted" in capsys.readouterr().out


def test_recall_shows_predictions_in_words(capsys: pytest.CaptureFixture) -> None:
    predictions = Predictions()
    predictions.recall("it will be cheated by", predictions.guess("saying quite thrice"))
    predictions.recall("and by", predictions.guess(...))
    out = capsys.readouterr().out
    assert "you wrote: saying quite thrice" in out and "you wrote nothing down" in out


def test_compare_finds_the_bin_of_a_number(capsys: pytest.CaptureFixture) -> None:
    bins = {"below 0.5": 0.5, "0.5 to 0.9": 0.9, "above 0.9": math.inf}
    predictions = Predictions()
    for question, found in [("low", 0.49), ("middle", 0.5), ("high", 7.0)]:
        predictions.compare(question, "0.5 to 0.9", torch.tensor(found), bins)
    low, middle, high = capsys.readouterr().out.splitlines()
    assert low == "low: below 0.5 (0.49), but you predicted 0.5 to 0.9"
    assert middle == "middle: 0.5 to 0.9 (0.5), as you predicted"
    assert high.startswith("high: above 0.9 (7), but")
    with pytest.raises(LessonError, match="2 is not in any bin"):
        predictions.compare("beyond", "small", 2.0, {"small": 1.0})
