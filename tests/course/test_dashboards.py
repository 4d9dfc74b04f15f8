"""Stored dashboards of healthy and broken runs, and the alarm that is held to them."""

import pytest

from rlhf_lab.course.bugs import SUSPECTS
from rlhf_lab.course.dashboards import COLUMNS, stored_dashboards
from rlhf_lab.course.grading import verdict_on
from rlhf_lab.course.registry import find_exercise


def test_every_kind_is_stored_with_three_seeds_and_all_lines() -> None:
    stored = stored_dashboards()
    assert list(stored) == ["healthy", *SUSPECTS]
    for runs in stored.values():
        assert len(runs) == 3
        assert all(run.keys() == COLUMNS.keys() for run in runs)
        assert all(len(numbers) == 8 for run in runs for numbers in run.values())


@pytest.mark.parametrize(
    ("suspect", "line", "holds"),
    [
        (SUSPECTS[0], "KL per sequence", lambda x: max(x) == 0),
        (SUSPECTS[1], "first ratio", lambda x: abs(x[0] - 1) > 0.5),
        (SUSPECTS[2], "reward", lambda x: x[-1] < x[0]),
        (SUSPECTS[3], "value loss", lambda x: x[-1] > 10 * x[0]),
        (SUSPECTS[4], "explained variance", lambda x: abs(x[-1]) < 0.01),
        (SUSPECTS[5], "explained variance", lambda x: x[-1] < -1),
        (SUSPECTS[6], "KL penalty", lambda x: max(x) < 0),
        (SUSPECTS[7], "KL per sequence", lambda x: max(x) == 0),
    ],
)
def test_each_suspect_shows_where_the_lesson_says(suspect: str, line: str, holds) -> None:
    assert all(holds(run[line]) for run in stored_dashboards()[suspect])
    assert not any(holds(run[line]) for run in stored_dashboards()["healthy"])


def test_an_alarm_of_another_kind_passes_and_one_that_misses_a_kind_does_not() -> None:
    def alarm(numbers):
        loss, variance = numbers["value loss"][-1], numbers["explained variance"][-1]
        still = not any(numbers["KL per sequence"])
        drifts = loss > 0.1 or loss < 0 or variance < 0.15 or numbers["KL penalty"][0] < 0
        return still or drifts or numbers["clipped"][0] > 0.5

    def deaf(numbers):
        return alarm(numbers) and bool(any(numbers["KL per sequence"]))

    exercise = find_exercise("alarm")
    assert verdict_on(exercise, alarm).state == "passed"
    verdict = verdict_on(exercise, deaf)
    assert verdict.state == "differs"
    assert "the learning rate is 0" in verdict.difference.rows[0][0] or verdict.slip
