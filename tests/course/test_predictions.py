"""Predictions are checked when they are made, and the first one counts."""

import pytest

from rlhf_lab.course import Predictions
from rlhf_lab.course.predictions import UnknownChoice


@pytest.mark.parametrize(
    ("written", "among", "taken"),
    [
        ("38/9", ["38 / 9", "38 / 12"], "38 / 9"),
        (4.2222, ["38 / 9", "38 / 12"], "38 / 9"),
        (0.5, ["0.5", "1.0"], "0.5"),
        ("0.3", [0.0, 0.3, 3.0], 0.3),
        ("6", range(7), 6),
        (" UP ", ["up", "down"], "up"),
        ("'yes'", ["yes", "no"], "yes"),
        (..., ["yes", "no"], None),
        (None, ["yes", "no"], None),
        ("a sentence", None, "a sentence"),
        (..., None, None),
    ],
)
def test_a_prediction_is_taken_as_the_choice_that_it_means(written, among, taken) -> None:
    assert Predictions().guess(written, among) == taken


@pytest.mark.parametrize(
    ("written", "among", "said"),
    [
        ("half", ["0.5", "1.0"], "put one of them in its place: '0.5', '1.0'"),
        (7, range(7), "a whole number from 0 to 6"),
        (0.4, ["0.5", "1.0"], "0.4 is none"),
        ("38 / 0", ["38 / 9"], "none of the choices"),
    ],
)
def test_what_is_no_choice_is_refused_with_the_choices(written, among, said) -> None:
    with pytest.raises(UnknownChoice, match=said) as refused:
        Predictions().guess(written, among)
    assert refused.value._render_traceback_() == [str(refused.value)]


def test_the_first_prediction_is_kept(capsys: pytest.CaptureFixture) -> None:
    predictions = Predictions()
    predictions.compare("it goes", "up", "down")
    assert "a surprise, you predicted up" in capsys.readouterr().out
    predictions.compare("it goes", "down", "down")
    said = capsys.readouterr().out
    assert "you predicted up" in said and "your first prediction is kept" in said
    predictions.show()
    shown = capsys.readouterr().out
    assert "surprise" in shown and "✓" not in shown


def test_a_prediction_made_after_the_result_does_not_count(capsys: pytest.CaptureFixture) -> None:
    predictions = Predictions()
    predictions.compare("it goes", ..., "down")
    assert "you made no prediction" in capsys.readouterr().out
    predictions.compare("it goes", "down", "down")
    assert "does not count" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("predicted", "found"), [(0.5, "0.5"), ("6", 6), ("Yes", "yes")])
def test_numbers_and_words_are_compared_by_what_they_say(predicted, found, capsys) -> None:
    Predictions().compare("it is", predicted, found)
    assert "as you predicted" in capsys.readouterr().out


@pytest.mark.parametrize(("predicted", "mark"), [("stop", "✓"), ("adj 3", "✓"), ("i", "surprise")])
def test_each_of_several_that_cannot_be_ranked_is_right(predicted, mark, capsys) -> None:
    predictions = Predictions()
    predictions.compare("it reads worst at", predicted, ("adj 3", "stop"))
    said = capsys.readouterr().out
    assert "adj 3 or stop" in said and ("as you predicted" in said) == (mark == "✓")
    predictions.show()
    shown = capsys.readouterr().out
    assert "adj 3 or stop" in shown and mark in shown


def test_words_of_ones_own_are_shown_again(capsys: pytest.CaptureFixture) -> None:
    predictions = Predictions()
    predictions.recall("it will be cheated by", predictions.guess("saying quite thrice"))
    predictions.recall("and by", predictions.guess(...))
    said = capsys.readouterr().out
    assert "you wrote: saying quite thrice" in said and "you wrote nothing down" in said
