"""What `check` and `hint` tell a learner."""

import dataclasses
import math

import pytest
import torch

from rlhf_lab import functional as F
from rlhf_lab.course import CheckNotPassed, api, check, hint, progress
from rlhf_lab.course.grading import verdict_on
from rlhf_lab.course.outcomes import observe
from rlhf_lab.course.progress_file import read_records
from rlhf_lab.course.registry import find_exercise
from rlhf_lab.probes import logit_shift
from tests.course.answers import written


def answer(name: str, function):
    """A learner's function, by the name of the exercise."""
    function.__name__ = name
    return function


def test_another_right_way_of_computing_it_passes() -> None:
    def gae(values, token_rewards, gamma=1.0, lam=0.95, mask=None):
        """A_t = sum_k (gamma lam)^k delta_{t+k}, as a matrix product over each row's real part."""
        out = torch.zeros_like(values)
        for row in range(len(values)):
            real = torch.ones(values.shape[1]).bool() if mask is None else mask[row]
            v = torch.cat([values[row, real], torch.zeros(1)])
            delta = token_rewards[row, real] + gamma * v[1:] - v[:-1]
            steps = torch.arange(len(delta))[None, :] - torch.arange(len(delta))[:, None]
            weights = torch.where(steps >= 0, (gamma * lam) ** steps.clamp(min=0).float(), 0.0)
            out[row, real] = weights @ delta
        return out

    def logprobs(logits, tokens, prefix_len=None, temperature=1.0):
        start = (prefix_len or 1) - 1
        scaled = logits[:, start:-1].float() / temperature
        picked = scaled.gather(-1, tokens[:, start + 1 :, None])[..., 0]
        return picked - scaled.logsumexp(-1)

    for name, function in (("compute_gae", gae), ("get_logprobs", logprobs)):
        verdict = verdict_on(find_exercise(name), answer(name, function))
        assert verdict.state == "passed", verdict.difference


def test_minibatches_in_another_random_order_are_told_from_the_ones_of_the_steps() -> None:
    """They would be as good, but `check(learning_phase)` compares weights and names nothing."""
    reference = find_exercise("ReplayMemory").reference

    class ReplayMemory(reference):
        def get_minibatches(self, generator):
            for _ in range(self.passes):
                order = torch.rand(len(self.rollout.texts), generator=generator).argsort()
                for rows in order.chunk(self.num_minibatches):
                    yield self._take(rows, self.rollout.samples.is_padded)

    verdict = verdict_on(find_exercise("ReplayMemory"), ReplayMemory)
    assert verdict.state == "differs" and "a valid order, but not that of" in verdict.slip

    class ReplayMemory(reference):
        def get_minibatches(self, generator):
            for _ in range(self.passes):
                order = torch.randperm(len(self.rollout.texts), generator=generator)
                for rows in order.chunk(self.num_minibatches):
                    yield self._take(rows, self.rollout.samples.is_padded)

    assert verdict_on(find_exercise("ReplayMemory"), ReplayMemory).state == "passed"


def test_a_stub_is_reported_as_not_written_without_a_stack(capsys: pytest.CaptureFixture) -> None:
    def kl_per_token(logprobs, ref_logprobs):
        raise NotImplementedError

    check(kl_per_token)
    said = capsys.readouterr().out
    assert "kl_per_token" in said and "not written yet" in said
    assert 'hint("kl_per_token")' in said  # which needs no cell to have run
    assert "Traceback" not in said
    assert read_records()["kl_per_token"].state == "unwritten"


def test_a_stub_of_a_method_is_reported_as_not_written() -> None:
    reference = find_exercise("ReplayMemory").reference

    class ReplayMemory(reference):
        def get_minibatches(self, generator):
            raise NotImplementedError

    assert verdict_on(find_exercise("ReplayMemory"), ReplayMemory).state == "unwritten"


def test_calling_another_stub_is_an_error_that_names_it() -> None:
    def kl_per_token(logprobs, ref_logprobs):
        raise NotImplementedError

    def calc_kl_penalty(kl, kl_coef, mask=None, denominator=None):
        return kl_coef * kl_per_token(kl[None], kl[None]).mean()

    verdict = verdict_on(find_exercise("calc_kl_penalty"), calc_kl_penalty)
    assert verdict.state == "differs"
    assert "kl_per_token is called, and is not written yet" in verdict.difference.rows[0]


def test_an_operation_that_torch_does_not_implement_is_not_taken_for_a_stub() -> None:
    def compute_returns(advantages, values, mask=None):
        raise NotImplementedError('"add" not implemented for this')

    assert verdict_on(find_exercise("compute_returns"), compute_returns).difference.kind == "error"


def test_a_wrong_number_shows_yours_expected_and_the_first_index(
    capsys: pytest.CaptureFixture,
) -> None:
    def compute_returns(advantages, values, mask=None):
        out = written(F.compute_returns)(advantages, values, mask)
        return out + torch.zeros_like(out).index_fill(1, torch.tensor([1]), 2.0)

    check(compute_returns)
    said = capsys.readouterr().out
    case = find_exercise("compute_returns").cases()[0].arguments
    right = (case["advantages"] + case["values"])[0, 1].item()
    assert "result at [0, 1]" in said
    assert f"{right + 2:.5g}" in said and f"{right:.5g}" in said
    assert "3 of 12" in said
    assert "advantages[3, 4]" in said


def test_lists_are_told_by_the_first_entry_that_differs_and_by_their_lengths() -> None:
    def attribute_logits(model, acts, word, other):
        found = written(logit_shift.attribute_logits)(model, acts, word, other)
        return dataclasses.replace(found, components=[*found.components[:-2], "bias", "b_U"])

    def shorter(model, acts, word, other):
        found = written(logit_shift.attribute_logits)(model, acts, word, other)
        return dataclasses.replace(found, components=found.components[:-1])

    exercise = find_exercise("attribute_logits")
    assert verdict_on(exercise, attribute_logits).difference.rows == (
        ("components[6]", "bias", "norm bias"),
    )
    assert verdict_on(exercise, shorter).difference.rows == (
        ("components[7]", "nothing", "b_U"),
        ("components: entries", "7", "8"),
    )


def test_a_known_slip_is_named_in_plain_words(capsys: pytest.CaptureFixture) -> None:
    def calc_kl_penalty(kl, kl_coef, mask=None, denominator=None):
        return written(F.calc_kl_penalty)(kl, 1.0, mask, denominator)

    check(calc_kl_penalty)
    assert "likely: the coefficient is missing" in capsys.readouterr().out


def test_two_slips_at_once_name_the_first_that_shows() -> None:
    def calc_kl_penalty(kl, kl_coef, mask=None, denominator=None):
        return kl.mean()

    verdict = verdict_on(find_exercise("calc_kl_penalty"), calc_kl_penalty)
    assert verdict.slip == "the coefficient is missing"


def test_an_unknown_mistake_gets_no_name() -> None:
    def calc_kl_penalty(kl, kl_coef, mask=None, denominator=None):
        penalty = written(F.calc_kl_penalty)(kl, kl_coef, mask, denominator)
        return penalty.sin() + penalty**1.5

    assert verdict_on(find_exercise("calc_kl_penalty"), calc_kl_penalty).slip is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "kind", "yours"),
    [
        (lambda out: out[0], "shape", "[4]"),
        (lambda out: out.double(), "dtype", "torch.float64"),
        (lambda out: out.sum().item(), "type", ""),
        (lambda out: None, "type", "None"),
        (lambda out: torch.tensor(out.tolist()), "gradient", "none: the result is detached"),
    ],
)
def test_shape_dtype_type_and_gradient_are_compared(change, kind: str, yours: str) -> None:
    fn = answer("kl_per_token", lambda logprobs, ref_logprobs: change(kl(logprobs, ref_logprobs)))
    kl = written(F.kl_per_token)
    difference = verdict_on(find_exercise("kl_per_token"), fn).difference
    assert difference.kind == kind
    assert yours in difference.rows[0][1]


def test_right_values_with_a_wrong_gradient_are_rejected() -> None:
    def kl_per_token(logprobs, ref_logprobs):
        kl = written(F.kl_per_token)(logprobs, ref_logprobs)
        return 2 * kl - kl.detach()

    difference = verdict_on(find_exercise("kl_per_token"), kl_per_token).difference
    assert difference.kind == "gradient"
    assert difference.rows[0][0].startswith("gradient of logprobs at")


def test_an_argument_changed_in_place_is_reported() -> None:
    def compute_returns(advantages, values, mask=None):
        result = written(F.compute_returns)(advantages, values, mask)
        values.zero_()
        return result

    difference = verdict_on(find_exercise("compute_returns"), compute_returns).difference
    assert (difference.kind, difference.rows) == (
        "in place",
        (("values", "changed in place", "untouched"),),
    )


def test_nan_in_an_argument_that_is_left_alone_is_not_taken_for_a_change() -> None:
    exercise = find_exercise("compute_returns")
    spoiled = next(case for case in exercise.cases() if case.label == "nan and inf at padding")
    assert not torch.isfinite(spoiled.arguments["advantages"]).all()
    assert observe(exercise, exercise.reference, spoiled).changed == ()

    def meddling(advantages, values, mask=None):
        result = written(F.compute_returns)(advantages, values, mask)
        values[0, 0] += 1
        return result

    assert observe(exercise, meddling, spoiled).changed == ("values",)


def test_an_error_is_one_line_with_the_line_of_the_learners_code(
    capsys: pytest.CaptureFixture,
) -> None:
    source = (
        "def compute_returns(advantages, values, mask=None):\n    x = 1\n    return values[9]\n"
    )
    namespace: dict = {}
    exec(compile(source, "<cell>", "exec"), namespace)
    check(namespace["compute_returns"])
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "IndexError" in said and "(line 3 of the cell)" in said
    assert "Traceback" not in said


def test_an_error_deep_in_a_package_is_told_with_the_line_of_the_learners_method() -> None:
    """It came from TransformerLens, and was told as line 465 of a cell of 90."""
    source = (
        "class TransformerWithValueHead(reference):\n"
        "    def forward(self, input_ids, attention_mask=None, past_kv_cache=None):\n"
        "        def cut(activation, hook):\n"
        "            return activation[:, :, :3]\n"
        "        with self.base_model.hooks(fwd_hooks=[('ln_final.hook_normalized', cut)]):\n"
        "            return self.base_model(input_ids), None\n"
    )
    exercise = find_exercise("TransformerWithValueHead")
    namespace: dict = {"reference": exercise.reference, "__name__": "cell"}
    exec(compile(source, "<cell>", "exec"), namespace)
    verdict = verdict_on(exercise, namespace["TransformerWithValueHead"])
    assert "(line 6 of the cell)" in verdict.difference.rows[0][1]


def test_a_name_that_an_earlier_cell_would_give_is_told_with_what_to_do() -> None:
    def compute_returns(advantages, values, mask=None):
        return zero_masked(advantages + values, mask)  # noqa: F821

    verdict = verdict_on(find_exercise("compute_returns"), compute_returns)
    error = verdict.difference.rows[0][1]
    assert "run the cell above that defines or imports zero_masked first" in error


def test_in_a_notebook_a_miss_stops_the_run_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute_returns(advantages, values, mask=None):
        return advantages

    monkeypatch.setattr(api, "_in_notebook", lambda: True)
    with pytest.raises(CheckNotPassed) as stopped:
        check(compute_returns)
    shown = stopped.value._render_traceback_()
    assert len(shown) == 1 and "compute_returns differs" in shown[0]
    check(F.compute_returns)


@pytest.mark.usefixtures("no_type_checks")
def test_a_function_that_is_no_exercise_is_refused_with_the_names() -> None:
    with pytest.raises(ValueError, match="len is not an exercise. Choose one of: .*kl_per_token"):
        check(len)
    with pytest.raises(ValueError, match="'kl_per_token' is not a function. Pass the function"):
        check("kl_per_token")


def test_hints_come_one_after_the_other_and_then_all(capsys: pytest.CaptureFixture) -> None:
    texts = [text.split()[:4] for text in find_exercise("kl_estimate").hints]
    shown = []
    for _ in range(4):
        hint("kl_estimate")
        said = capsys.readouterr().out
        shown.append([i for i, words in enumerate(texts) if " ".join(words) in said])
    assert shown == [[0], [1], [2], [0, 1, 2]]
    assert read_records()["kl_estimate"].hints == 3


def test_progress_shows_states_checks_and_hints(capsys: pytest.CaptureFixture) -> None:
    def compute_returns(advantages, values, mask=None):
        return F.zero_masked(advantages + values, mask)

    def lr_scale(phase, warmup_steps, total_phases, final_scale):
        return math.nan

    check(compute_returns)
    check(lr_scale)
    check(lr_scale)
    hint(lr_scale)
    capsys.readouterr()
    progress()
    lines = capsys.readouterr().out.splitlines()
    row = {
        name: next(x for x in lines if f"{name} " in x) for name in ("compute_returns", "lr_scale")
    }
    assert "✓ passed" in row["compute_returns"] and "0/3" in row["compute_returns"]
    assert "✗ differs" in row["lr_scale"] and " 2 " in row["lr_scale"] and "1/3" in row["lr_scale"]


def test_checking_the_packages_own_function_is_not_noted() -> None:
    check(F.compute_returns)
    assert read_records() == {}
