"""Output of `check`, `hint` and `progress`, as a learner sees it."""

import pytest
import torch

from rlhf_lab import functional as F
from rlhf_lab.__main__ import main as lab
from rlhf_lab.course import CheckNotPassed, check, hint, progress
from rlhf_lab.course.exercise import find_exercise
from rlhf_lab.course.grading import Judge, Verdict
from rlhf_lab.course.outcomes import Outcome, compare_outcomes, observe
from rlhf_lab.course.progress_file import read_records


def judge(fn) -> Verdict:
    return Judge(find_exercise(fn)).verdict(fn)


def defined(source: str, **names):
    """Return what a cell defines, as a notebook would define it."""
    namespace = {"__name__": "cell", **names}
    before = set(namespace)
    exec(compile(source, "<cell>", "exec"), namespace)
    return next(value for name, value in namespace.items() if name not in before | {"__builtins__"})


def test_check_reports_a_stub_in_one_line(capsys: pytest.CaptureFixture) -> None:
    def kl_per_token(logprobs, ref_logprobs):
        raise NotImplementedError

    check(kl_per_token)
    out = capsys.readouterr().out
    assert 'kl_per_token  not written yet; for a hint, run hint("kl_per_token")' in out
    assert "Traceback" not in out
    assert read_records()["kl_per_token"].state == "unwritten"


def test_check_reports_stubs_of_methods_and_calls_of_stubs() -> None:
    class ReplayMemory(find_exercise("ReplayMemory").reference):
        def get_minibatches(self, generator):
            raise NotImplementedError

    def kl_per_token(logprobs, ref_logprobs):
        raise NotImplementedError

    def calc_kl_penalty(kl, kl_coef, mask=None, denominator=None):
        return kl_coef * kl_per_token(kl[None], kl[None]).mean()

    def compute_returns(advantages, values, mask=None):
        raise NotImplementedError('"add" not implemented for this')  # as torch raises it

    assert judge(ReplayMemory).state == "unwritten"
    rows = judge(calc_kl_penalty).difference.rows
    assert "kl_per_token is called, but it is not written yet" in rows[0]
    assert judge(compute_returns).difference.kind == "error"


def test_check_shows_yours_expected_and_the_first_index(capsys: pytest.CaptureFixture) -> None:
    def compute_returns(advantages, values, mask=None):
        out = F.compute_returns(advantages, values, mask)
        return out + torch.zeros_like(out).index_fill(1, torch.tensor([1]), 2.0)

    check(compute_returns)
    out = capsys.readouterr().out
    case = find_exercise("compute_returns").cases()["ordinary"]
    right = (case["advantages"] + case["values"])[0, 1].item()
    for text in ("result at [0, 1]", f"{right + 2:.5g}", f"{right:.5g}", "3 of 12"):
        assert text in out
    assert "advantages[3, 4]" in out


def test_lists_differ_at_the_first_entry_or_by_their_lengths() -> None:
    rows = lambda *names: (
        compare_outcomes(
            Outcome({"parts": list(names)}, {}), Outcome({"parts": ["b_E", "b_U"]}, {})
        ).rows
    )
    assert rows("b_E", "b") == (("parts[1]", "b", "b_U"),)
    assert rows("b_E") == (("parts[1]", "nothing", "b_U"), ("parts: entries", "1", "2"))


def test_check_names_a_slip_and_not_what_it_does_not_know(capsys: pytest.CaptureFixture) -> None:
    def calc_kl_penalty(kl, kl_coef, mask=None, denominator=None):
        return F.calc_kl_penalty(kl, 1.0, mask, denominator)

    check(calc_kl_penalty)
    assert "likely: the coefficient is missing" in capsys.readouterr().out

    def calc_kl_penalty(kl, kl_coef, mask=None, denominator=None):  # two slips: the first is named
        return kl.mean()

    assert judge(calc_kl_penalty).slip == "the coefficient is missing"

    def calc_kl_penalty(kl, kl_coef, mask=None, denominator=None):
        penalty = F.calc_kl_penalty(kl, kl_coef, mask, denominator)
        return penalty.sin() + penalty**1.5

    assert judge(calc_kl_penalty).slip is None


def test_a_slip_that_agrees_in_one_case_is_not_named() -> None:
    def calc_kl_penalty(kl, kl_coef, mask=None, denominator=None):
        is_first = kl.shape == (3, 4) and mask is None and denominator is None and kl.max() < 9
        return kl.mean() if is_first else kl.square().sin().sum() ** 3

    assert "coefficient" not in (judge(calc_kl_penalty).slip or "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "kind", "yours"),
    [
        (lambda out: out[0], "shape", "[4]"),
        (lambda out: out.double(), "dtype", "torch.float64"),
        (lambda out: out.sum().item(), "type", ""),
        (lambda out: None, "type", "None"),
        (lambda out: torch.tensor(out.tolist()), "gradient", "none: the result is detached"),
        (lambda out: 2 * out - out.detach(), "gradient", ""),
    ],
)
def test_check_compares_shape_dtype_type_and_gradient(change, kind: str, yours: str) -> None:
    def kl_per_token(logprobs, ref_logprobs):
        return change(F.kl_per_token(logprobs, ref_logprobs))

    difference = judge(kl_per_token).difference
    assert difference.kind == kind and yours in difference.rows[0][1]


def test_check_reports_an_argument_changed_in_place() -> None:
    def compute_returns(advantages, values, mask=None):
        result = F.compute_returns(advantages, values, mask)
        values[0, 0] += 1
        return result

    difference = judge(compute_returns).difference
    rows = (("values", "changed in place", "unchanged"),)
    assert (difference.kind, difference.rows) == ("in place", rows)
    exercise = find_exercise("compute_returns")
    spoiled = exercise.cases()["nan and inf at padding"]
    assert observe(exercise, exercise.reference, spoiled).changed == ()
    assert observe(exercise, compute_returns, spoiled).changed == ("values",)


def test_an_error_is_shown_with_the_line_of_the_cell(capsys: pytest.CaptureFixture) -> None:
    source = (
        "def compute_returns(advantages, values, mask=None):\n"
        "    def last():\n        return values[9]\n    return last()\n"
    )
    check(defined(source))
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "IndexError" in out and "(line 3 of the cell)" in out and "Traceback" not in out


@pytest.mark.slow
def test_an_error_in_a_package_has_the_line_of_the_cell() -> None:
    source = (
        "class TransformerWithValueHead(reference):\n"
        "    def forward(self, input_ids, attention_mask=None, past_kv_cache=None):\n"
        "        def cut(activation, hook):\n"
        "            return activation[:, :, :3]\n"
        "        with self.base_model.hooks(fwd_hooks=[('ln_final.hook_normalized', cut)]):\n"
        "            return self.base_model(input_ids), None\n"
    )
    reference = find_exercise("TransformerWithValueHead").reference
    rows = judge(defined(source, reference=reference)).difference.rows
    assert "(line 6 of the cell)" in rows[0][1]


def test_an_undefined_name_is_shown_with_what_to_do() -> None:
    def compute_returns(advantages, values, mask=None):
        return zero_masked(advantages + values, mask)  # noqa: F821

    error = judge(compute_returns).difference.rows[0][1]
    assert "run the cell above that defines or imports zero_masked first" in error


def test_in_a_notebook_a_difference_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute_returns(advantages, values, mask=None):
        return advantages

    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    with pytest.raises(CheckNotPassed) as stopped:
        check(compute_returns)
    lines = stopped.value._render_traceback_()
    assert len(lines) == 1 and "compute_returns differs" in lines[0]
    check(F.compute_returns)


@pytest.mark.usefixtures("no_type_checks")
def test_check_raises_on_what_is_not_an_exercise() -> None:
    with pytest.raises(ValueError, match="len is not an exercise. Choose one of: .*kl_per_token"):
        check(len)
    with pytest.raises(ValueError, match="'kl_per_token' is not a function. Pass the function"):
        check("kl_per_token")


def test_hints_come_one_after_the_other_and_then_all(capsys: pytest.CaptureFixture) -> None:
    starts = [" ".join(text.split()[:4]) for text in find_exercise("kl_estimate").hints]
    numbers = []
    for _ in range(4):
        hint("kl_estimate")
        out = capsys.readouterr().out
        numbers.append([i for i, start in enumerate(starts) if start in out])
    assert numbers == [[0], [1], [2], [0, 1, 2]]
    assert read_records()["kl_estimate"].hints == 3


def test_progress_shows_states_checks_and_hints(capsys, progress_file) -> None:
    def compute_returns(advantages, values, mask=None):
        return F.zero_masked(advantages + values, mask)

    def generated_values(values, prefix_len):
        return values[:, prefix_len:]

    for fn in (compute_returns, generated_values, generated_values, F.calc_kl_penalty):
        check(fn)
    hint(generated_values)
    assert read_records().keys() == {"compute_returns", "generated_values"}  # not the package's own
    capsys.readouterr()
    assert lab(["progress"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert str(progress_file) in "".join(lines)
    (row,) = [line for line in lines if "generated_values" in line]
    assert "✗ differs" in row and " 2 " in row and "1/3" in row
    assert any("TransformerWithValueHead" in line and "○ unwritten" in line for line in lines)
    assert any("all lessons: 1 of " in x for x in lines) and "compute_returns" not in str(lines)
    check(compute_returns)
    progress()
    assert "✓ passed" in capsys.readouterr().out
