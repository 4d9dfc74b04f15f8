"""What is said of wrong answers that neither a slip nor a relation foresees."""

import ast
from types import FunctionType

import pytest
import torch

from rlhf_lab import functional as F
from rlhf_lab.course.exercise import Case
from rlhf_lab.course.explaining import candidates, explained
from rlhf_lab.course.grading import Judge, verdict_on
from rlhf_lab.course.handling import handlings
from rlhf_lab.course.outcomes import Miss, Outcome
from rlhf_lab.course.places import places
from rlhf_lab.course.readings import read_error
from rlhf_lab.course.registry import find_exercise
from rlhf_lab.course.rewrites import rewrites
from rlhf_lab.course.wording import Wording

MISSED = Miss("value", (("result", "1", "2"),))


@pytest.fixture(scope="module")
def judges() -> dict[str, Judge]:
    """Judges by their exercise, each made once."""
    names = ("compute_returns", "rloo_advantages", "alarm")
    return {name: Judge(find_exercise(name)) for name in names}


def test_rewrites_leave_out_exchange_and_shift_parts_and_say_so() -> None:
    said = {says for says, _ in rewrites(find_exercise("compute_gae"))}
    for words in (
        "the factor lam were left out",
        "values were not subtracted",
        "this went forward and not backward",
        "gamma stood where lam is due",
    ):
        assert any(words in says for says in said), words


def test_rewrites_touch_neither_refusals_nor_annotations() -> None:
    exercise = find_exercise("compute_gae")
    assert not any("is from 0 to 1" in says or "the name" in says for says, _ in rewrites(exercise))
    reference = exercise.reference
    for _, fn in rewrites(exercise):
        assert fn.__annotations__.keys() == reference.__annotations__.keys()


def test_a_mutant_that_agrees_everywhere_gives_its_words(judges: dict[str, Judge]) -> None:
    judge = judges["rloo_advantages"]

    def rloo_advantages(rewards, group):
        out = torch.zeros_like(rewards)
        for i in range(len(rewards)):
            others = (group == group[i]) & (torch.arange(len(rewards)) != i)
            out[i] = rewards[i] + rewards[others].mean()
            if (rewards[group == group[i]] == rewards[i]).all():
                out[i] = 0.0
        return out

    verdict = judge.verdict(rloo_advantages)
    assert "were added, and not subtracted" in verdict.slip


def test_facts_of_yes_and_no_are_not_explained_by_coincidence(judges: dict[str, Judge]) -> None:
    judge = judges["alarm"]

    def alarm(numbers):
        return numbers["gradient norm"][0] > numbers["entropy"][-1] + 3

    outcomes = judge._outcomes(alarm)
    misses = [MISSED] * len(outcomes)
    assert explained(judge.exercise, alarm, judge.cases, outcomes, judge.expected, misses) is None


def test_a_right_answer_looks_for_nothing(
    judges: dict[str, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_):
        raise AssertionError("a right answer must not be explained")

    monkeypatch.setattr("rlhf_lab.course.grading.explained", forbidden)

    def right(advantages, values, mask=None):
        out = advantages.float() + values.float()
        return out if mask is None else out.masked_fill(~mask, 0.0)

    assert judges["compute_returns"].verdict(named(right, "compute_returns")).state == "passed"


def named(fn: FunctionType, name: str) -> FunctionType:
    fn.__name__ = name
    return fn


def test_two_slips_at_once_are_both_named() -> None:
    exercise = find_exercise("compute_returns")
    pairs = [says for says, _ in candidates(exercise) if says.startswith("two things at once")]
    assert len(pairs) == len(set(pairs)) and len(pairs) > 5


def test_handlings_of_a_class_are_none() -> None:
    assert list(handlings(find_exercise("ReplayMemory"))) == []


def test_wording_names_arguments_and_does_not_quote_code() -> None:
    tree = ast.parse(
        "def f(values: Float, mask: Bool):\n"
        '    """The mean of the real."""\n'
        "    hidden = values.square().mean(-1)\n"
        "    return zero_masked(hidden, mask) / mask.sum()\n"
    )
    wording = Wording(tree)
    quotient = tree.body[0].body[-1].value
    assert "values" in wording.of(quotient) and "hidden" not in wording.of(quotient)
    assert wording.alike("values") == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            "RuntimeError: The size of tensor a (4) must match the size of tensor b (3) at "
            "non-singleton dimension 1",
            "along axis 1 one has 4 (gen) entries, the other 3 (batch)",
        ),
        ("TypeError: f() missing 1 required positional argument: 'lam'", "without 'lam'"),
        ("IndexError: index 4 is out of bounds for dimension 1 with size 4", "entry 4"),
        ("RuntimeError: Boolean value of Tensor with more than one value is ambiguous", "where"),
        (
            "Type-check error whilst checking the return value of f.\n"
            "Actual value: f32[3,4](torch)\nExpected type: Float[Tensor, ' batch'].",
            "what comes back is a tensor of shape [3, 4] (floats), and a tensor [batch] (floats)",
        ),
        ("RuntimeError: something that nobody knows", None),
    ],
)
def test_an_error_is_read_in_plain_words(error: str, words: str | None) -> None:
    exercise = find_exercise("compute_returns")
    said = read_error(exercise, error, exercise.cases()[0])
    assert said is None if words is None else words in said


def test_places_name_the_last_column_padding_and_the_sign_of_an_argument() -> None:
    x = torch.tensor([[1.0, -2.0, 3.0], [-4.0, 5.0, 6.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    case = Case("masked", {"x": x, "mask": mask})
    right = Outcome({"result": x}, {})

    def where(wrong: torch.Tensor) -> str | None:
        outcome = Outcome({"result": torch.where(wrong, x + 1, x)}, {})
        return places([case], [outcome], [right], [MISSED])

    last = torch.tensor([[False, False, True]] * 2)
    assert where(last).startswith("only the last place of each row")
    assert where(~mask).startswith("only masked places")
    assert where(x < 0) == "it is right but for the places where x is below 0"
    assert where(torch.ones_like(mask)) is None


def _bootstraps(values, rewards, mask=None, gamma=1.0):
    if rewards.ndim == 1:
        everything = torch.ones_like(values, dtype=torch.bool)
        rewards = F.token_rewards(rewards, everything if mask is None else mask)
    following = torch.cat([values[:, 1:], values[:, -1:]], 1)
    advantages = rewards + gamma * following - values
    return advantages if mask is None else torch.where(mask, advantages, 0.0)


def test_a_change_that_helps_in_some_cases_alone_is_not_named() -> None:
    """A log-softmax over the one place of a text of one token is 0, which is right there only."""
    found = verdict_on(find_exercise("compute_advantages"), _bootstraps)
    assert found.state == "differs" and "log_softmax" not in (found.slip or "")
