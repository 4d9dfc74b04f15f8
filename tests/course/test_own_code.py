"""Diagnoses of wrong answers as learners write them: by slips and relations."""

import contextlib
import math

import pytest
import torch

from rlhf_lab import functional as F
from rlhf_lab.course.exercise import Slip
from rlhf_lab.course.grading import verdict_on
from rlhf_lab.course.mutants import known_mistakes, mutant
from rlhf_lab.course.registry import all_exercises, find_exercise
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.value_head import VALUE_HOOK

WITH_FORMS = [exercise for exercise in all_exercises() if exercise.forms]


def _thrown_away(x, mask=None):
    if mask is not None:
        x.masked_fill(~mask, 0.0)
    return x.sum(-1)


def _in_place(x, mask=None):
    if mask is not None:
        x[~mask] = 0.0
    return x.sum(-1)


def _written_into_a_copy(z, donor, heads, positions):
    patched = z.clone()
    patched[:, :, heads][:, positions] = donor[:, :, heads][:, positions]
    return patched


def _copied_in_each_round(z, donor, heads, positions):
    for head in heads:
        patched = z.clone()
        patched[:, positions, head] = donor[:, positions, head]
    return patched


def _log_probabilities(logprobs, noise):
    reached = logprobs.cumsum(-1)
    return (reached > noise[:, None] * reached[:, -1:]).long().argmax(-1)


def _own_detached(logprobs, advantages, mask=None):
    logprobs = F.zero_masked(F.at_least_float32(logprobs), mask).detach()
    return F.masked_mean(F.zero_masked(F.at_least_float32(advantages), mask) * logprobs, mask)


def _log_of_price(solve, kl):
    low, high = math.log(1e-4), math.log(1e4)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if solve(math.exp(middle))[1] > kl else (low, middle)
    return low


def _wrong_way(solve, kl):
    low, high = 1e-4, 1e4
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if solve(middle)[1] > kl else (middle, high)
    return low


def _mean_of_zeros(z, heads, positions, to="zero"):
    ablated = z.clone()
    ablated[:, positions, heads] = 0.0
    if to == "mean":
        ablated[:, positions, heads] = ablated[:, positions, heads].mean(0)
    return ablated


def _impossible_paid(chances, rewards, beta):
    possible = rewards.clone()
    possible[chances == 0] = -torch.inf
    weights = chances * ((rewards - possible.amax(-1, keepdim=True)) / beta).exp()
    return weights / weights.sum(-1, keepdim=True)


def _global_noise(logprobs, noise):
    return torch.multinomial(logprobs.exp(), 1)[:, 0]


def _rows_side_by_side(rewards, group):
    table = rewards.reshape(-1, int((group == group[0]).sum()))
    others = (table.sum(1, keepdim=True) - table) / max(table.shape[1] - 1, 1)
    return (table - others).flatten()


class _Detaching(TransformerWithValueHead):
    """A hook that hands on what it is given, but without its gradient."""

    @contextlib.contextmanager
    def value_hook(self):
        values = []

        def read(activation, hook):
            values.append(self.value_head(activation)[..., 0])
            return activation.detach()

        with self.base_model.hooks(fwd_hooks=[(VALUE_HOOK, read)]):
            yield values


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "written", "said"),
    [
        ("sequence_sum", _thrown_away, "the mask is not used"),
        ("sequence_sum", _in_place, "this changes x in place"),
        ("patch_heads", _written_into_a_copy, "writes into a copy when the first index is a list"),
        ("patch_heads", _copied_in_each_round, "copy z once, before the loop"),
        ("draw_token", _log_probabilities, "log-probabilities are added up: take exp first"),
        ("policy_gradient_objective", _own_detached, "no gradient reaches logprobs"),
        ("best_at_budget", _log_of_price, "the logarithm of beta"),
        ("best_at_budget", _wrong_way, "wrong half is kept"),
        ("ablate_heads", _mean_of_zeros, "this writes 0"),
        ("tilt", _impossible_paid, "an outcome of chance 0 turns the result into nan"),
        ("draw_token", _global_noise, "use the noise in the arguments"),
        ("rloo_advantages", _rows_side_by_side, "rows that stand side by side"),
        ("TransformerWithValueHead", _Detaching, "the hook returns something"),
    ],
)
def test_the_fault_of_an_answer_that_no_slip_foresees_is_named(name: str, written, said) -> None:
    verdict = verdict_on(find_exercise(name), written)
    assert verdict.state == "differs"
    assert said in (verdict.slip or "")


@pytest.mark.slow
@pytest.mark.parametrize("exercise", WITH_FORMS, ids=lambda e: e.name)
def test_each_form_of_a_reference_is_right_and_slips_are_tried_in_it(exercise) -> None:
    for form in exercise.forms:
        assert verdict_on(exercise, mutant(exercise, Slip("form", form))).state == "passed"
    assert len(known_mistakes(exercise)) > len(exercise.slips) + 1
