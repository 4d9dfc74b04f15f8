"""Debugging PPO: stored dashboards, broken trainers, the alarm, and the ladder."""

from rlhf_lab.course.debugging import WRONG_CLIMBERS, falls_from, first_word, last_word
from rlhf_lab.course.exercise import find_exercise
from rlhf_lab.course.grading import Judge
from rlhf_lab.course.seed_figures import stored_figures


def test_alarm_passes_unless_it_misses_a_kind() -> None:
    def alarm(numbers):
        loss, variance = numbers["value loss"][-1], numbers["explained variance"][-1]
        still = not any(numbers["KL per sequence"])
        drifts = loss > 0.1 or loss < 0 or variance < 0.15 or numbers["KL penalty"][0] < 0
        return still or drifts or numbers["clipped"][0] > 0.5

    def deaf(numbers):
        return alarm(numbers) and bool(any(numbers["KL per sequence"]))

    exercise = find_exercise("alarm")
    assert Judge(exercise).verdict(alarm).state == "passed"
    verdict = Judge(exercise).verdict(deaf)
    assert verdict.state == "differs"
    assert "the learning rate is 0" in verdict.difference.rows[0][0] or verdict.slip


def test_the_rewards_of_words_are_those_of_their_first_letters():
    """The prompt is "this movie": the third word is the first one that is written."""
    texts = ["this movie was nice", "this movie Zoo map", "this movie"]
    assert first_word(texts).tolist() == [0, 0, 0]
    assert first_word(["this movie map zoo"]).tolist() == [1]
    assert last_word([*texts, ""]).tolist() == [0, 1, 1, 0]


def test_each_wrong_trainer_fails_at_another_rung():
    climbs = stored_figures("bug_hunt")["climbs"]
    falls = {name: [falls_from(one) for one in runs] for name, runs in climbs.items()}
    assert falls.keys() == {"healthy", *WRONG_CLIMBERS}
    assert list(falls.values()) == [[4] * 3, [1] * 3, [2] * 3, [3] * 3]
    credit, healthy = (climbs[name] for name in ("credit for the last", "healthy"))
    assert all(a["2: last word"] > b["2: last word"] for a, b in zip(credit, healthy, strict=True))
