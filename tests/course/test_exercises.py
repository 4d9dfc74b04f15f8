"""Every reference passes its check; every wrong answer is rejected and named."""

import dataclasses
import os

import pytest

from rlhf_lab.course.exercise import Exercise, Slip, all_exercises, find_exercise
from rlhf_lab.course.grading import Judge
from rlhf_lab.course.mutants import known_mistakes, mutant

EXERCISES = all_exercises()
WITH_FORMS = [exercise for exercise in EXERCISES if exercise.forms]
LONG = ("assign_credit", "learning_phase", "score_samples")  # a fourth of the slips in `make test`


@pytest.mark.slow
@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.name)
def test_reference_passes_and_wrong_answers_are_named(exercise: Exercise) -> None:
    assert len(exercise.slips) >= 2
    assert exercise.difficulty in range(1, 6) and exercise.importance in range(6)
    assert 1 <= exercise.minutes <= 40
    assert len({hint.strip() for hint in exercise.hints} - {""}) == 3
    judge = Judge(exercise)
    assert any(outcome.error for outcome in judge.expected) == exercise.errors_tried
    assert judge.verdict(exercise.reference).state == "passed"
    is_long = exercise.name in LONG and not os.environ.get("RLHF_LAB_NIGHTLY")
    for slip in exercise.slips[:: 4 if is_long else 1]:
        verdict = judge.verdict(mutant(exercise, slip))
        assert (verdict.state, verdict.slip) == ("differs", slip.says)
        assert (verdict.difference.kind == "error") == slip.raises


def test_slip_without_its_edit_raises_outside_of_checks() -> None:
    exercise = find_exercise("compute_returns")
    stale = Slip("stale", {"no such text": ""})
    with pytest.raises(ValueError, match="'no such text' occurs 0 times in compute_returns"):
        mutant(exercise, stale)
    with pytest.raises(ValueError, match="'mask' occurs . times in compute_returns"):
        mutant(exercise, Slip("ambiguous", {"mask": ""}))
    edited = dataclasses.replace(exercise, slips=(stale, *exercise.slips))
    wrong = mutant(exercise, exercise.slips[0])
    assert Judge(edited).verdict(wrong).slip == exercise.slips[0].says


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("exercise", WITH_FORMS, ids=lambda e: e.name)
def test_forms_of_a_reference_pass_and_carry_slips(exercise) -> None:
    for form in exercise.forms:
        assert Judge(exercise).verdict(mutant(exercise, Slip("form", form))).state == "passed"
    assert len(known_mistakes(exercise)) > len(exercise.slips) + 1
