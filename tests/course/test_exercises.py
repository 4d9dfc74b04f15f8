"""Every reference passes its check; every wrong answer is rejected and named."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from rlhf_lab.course.exercise import Exercise, Slip
from rlhf_lab.course.gate import try_exercise
from rlhf_lab.course.judge import Judge, judge
from rlhf_lab.course.mutants import (
    DETACHED,
    FLIPPED,
    RETURNS_ZERO,
    SUMMED,
    generic_mutants,
    mutant,
)
from rlhf_lab.course.registry import all_exercises, find_exercise
from rlhf_lab.course.stub import solution_source

EXERCISES = all_exercises()


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.name)
def test_the_reference_passes_and_every_wrong_answer_is_rejected_and_named(
    exercise: Exercise,
) -> None:
    judge = Judge(exercise)
    assert [outcome.error for outcome in judge.expected] == [None] * len(judge.cases)
    assert judge.verdict(exercise.reference).state == "passed"
    for slip in exercise.slips:
        verdict = judge.verdict(mutant(exercise.reference, slip))
        assert (verdict.state, verdict.slip) == ("differs", slip.says)
        assert verdict.miss.kind != "error"
    for says, wrong in generic_mutants(exercise).items():
        verdict = judge.verdict(wrong)
        assert verdict.state == "differs", says
        assert verdict.slip is not None, says


def test_there_are_at_least_forty_slips_and_two_for_each_exercise() -> None:
    counts = [len(exercise.slips) for exercise in EXERCISES]
    assert sum(counts) >= 40 and min(counts) >= 2


def test_generic_mistakes_are_tried_wherever_they_are_wrong() -> None:
    tried = {exercise.name: set(generic_mutants(exercise)) for exercise in EXERCISES}
    assert all(RETURNS_ZERO in kinds for kinds in tried.values())
    assert tried["calc_kl_penalty"] == {RETURNS_ZERO, FLIPPED, DETACHED, SUMMED}
    averaging = {name for name, kinds in tried.items() if SUMMED in kinds}
    assert averaging == {
        "normalize_reward",
        "calc_kl_penalty",
        "calc_entropy_bonus",
        "calc_clipped_surrogate_objective",
        "calc_value_function_loss",
    }
    without_gradient = {name for name, kinds in tried.items() if DETACHED not in kinds}
    assert without_gradient == {
        "TransformerWithValueHead",
        "normalize_reward",
        "compute_advantages",
        "compute_gae",
        "compute_returns",
        "get_optimizer",
        "lr_scale",
        "get_optimizer_and_scheduler",
        "ReplayMemory",
        "rollout_phase",
        "learning_phase",
        "fit_ridge",
        "AdaptiveKLController",
        "fit_direction",
        "unchanged_fraction",
        "describe_spectrum",
        "attribute_logits",
    }


def test_the_objective_terms_cannot_be_detached_sign_flipped_summed_or_zero() -> None:
    """The four terms that are trained on must not pass with a wrong gradient."""
    for name in (
        "calc_kl_penalty",
        "calc_entropy_bonus",
        "calc_clipped_surrogate_objective",
        "calc_value_function_loss",
    ):
        exercise = find_exercise(name)
        judge = Judge(exercise)
        named = {judge.verdict(wrong).slip for wrong in generic_mutants(exercise).values()}
        assert named == {RETURNS_ZERO, FLIPPED, DETACHED, SUMMED}


def test_the_gate_reports_a_slip_that_passes_or_is_taken_for_another() -> None:
    exercise = find_exercise("compute_returns")
    harmless = Slip("changes nothing", {"+ at_least_float32": "+  at_least_float32"})
    twin = Slip("another name", exercise.slips[0].edits)
    edited = dataclasses.replace(exercise, slips=(*exercise.slips, harmless, twin))
    problems = " ".join(try_exercise(edited).problems)
    assert "the slip passes: changes nothing" in problems
    assert "the slip 'another name' is taken for" in problems
    assert try_exercise(exercise).problems == ()


def test_the_gate_reports_an_exercise_that_is_incomplete() -> None:
    exercise = find_exercise("compute_returns")
    poor = dataclasses.replace(
        exercise, difficulty=0, minutes=99, hints=("a", "a", "b"), slips=exercise.slips[:1]
    )
    problems = " ".join(try_exercise(poor).problems)
    for part in ("difficulty is 0", "minutes is 99", "three different hints", "there are 1 slips"):
        assert part in problems


def test_a_slip_whose_edit_is_not_in_the_reference_is_refused_but_does_not_stop_a_check() -> None:
    exercise = find_exercise("compute_returns")
    stale = Slip("stale", {"no such text": ""})
    with pytest.raises(ValueError, match="'no such text', which stands 0 times in compute_returns"):
        mutant(exercise.reference, stale)
    edited = dataclasses.replace(exercise, slips=(stale, *exercise.slips))
    wrong = mutant(exercise.reference, exercise.slips[0])
    assert judge(edited, wrong).slip == exercise.slips[0].says


@pytest.mark.parametrize("name", [e.name for e in EXERCISES if inspect.isclass(e.reference)])
def test_no_method_of_a_class_is_annotated_with_the_class_itself(name: str) -> None:
    """A cell may be run twice, and the annotation would be held against the class of the first."""
    source = solution_source(find_exercise(name), set())
    annotations = re.findall(r"(?:->|:) *[\"'](\w+)[\"']", source)
    assert name not in annotations


def test_a_policy_defined_twice_can_still_be_moved(tmp_path: Path) -> None:
    shell = InteractiveShell()
    shell.run_cell("%load_ext jaxtyping\n%jaxtyping.typechecker beartype.beartype")
    imports = (
        "import torch\nfrom jaxtyping import Bool, Float, Int\nfrom torch import Tensor, nn\n"
        "from rlhf_lab.course.exercises.toys import toy_transformer\n"
    )
    policy = solution_source(find_exercise("TransformerWithValueHead"), {"torch", "nn", "Tensor"})
    for cell in (imports, *2 * [policy, "TransformerWithValueHead(toy_transformer()).to('cpu')"]):
        shell.run_cell(cell).raise_error()


def test_judging_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for name in ("TransformerWithValueHead", "ReplayMemory", "kl_per_token"):
        exercise = find_exercise(name)
        judge(exercise, mutant(exercise.reference, exercise.slips[0]))
    assert torch.equal(before, torch.get_rng_state())
