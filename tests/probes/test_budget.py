import pytest

from rlhf_lab.errors import ConfigError
from rlhf_lab.probes.budget import Budget, Planned, fit_plan, stored_megabytes, time_share
from rlhf_lab.probes.probe import ProbeCost, RunShape

# A phase costs 10 * (4 * 5 + 2 * 10 + 3 * 2 * 10) = 1000 tokens, the run 8000.
SHAPE = RunShape(
    phases=8,
    batch=10,
    prefix_len=5,
    gen_len=5,
    passes=2,
    eval_tokens=200,
    n_layers=2,
    d_model=4,
    d_vocab=8,
    n_parameters=50,
)


def test_a_phase_is_counted_in_tokens_of_one_forward():
    assert SHAPE.phase_tokens == 1000


def test_calls_are_due_every_few_phases_and_at_the_end():
    assert [Planned("p", every, ProbeCost()).calls(8) for every in (1, 3, 8, 20, 0)] == [
        9,
        4,
        2,
        2,
        0,
    ]


def test_time_counts_forwards_arithmetic_and_the_shared_forward_once():
    plan = [
        Planned("a", 4, ProbeCost(forward_tokens=100)),  # 3 calls * 100 = 300
        Planned("b", 8, ProbeCost(flops=1000), True),  # 2 calls * 1000 / (2 * 50) = 20
        Planned("c", 4, ProbeCost(), True),  # 3 shared forwards of 200 = 600, b's among them
    ]
    assert time_share(plan, SHAPE) == pytest.approx((300 + 20 + 600) / 8000)


def test_megabytes_count_every_call():
    plan = [Planned("a", 4, ProbeCost(bytes=2**20)), Planned("b", 8, ProbeCost(bytes=2**19))]
    assert stored_megabytes(plan, SHAPE) == 4


def test_a_plan_within_budget_is_left_alone():
    plan = [Planned("a", 1, ProbeCost(forward_tokens=100))]
    assert fit_plan(plan, SHAPE, Budget(time_frac=0.2)) == (plan, [])


def test_the_most_expensive_probe_is_thinned_first():
    plan = [Planned("cheap", 1, ProbeCost(forward_tokens=10)), Planned("dear", 1, ProbeCost(400))]
    # 90 + 3600 of 8000; dear every 2: 90 + 2000 = 26 %; every 4: 90 + 1200 = 16 %.
    fitted, notes = fit_plan(plan, SHAPE, Budget(time_frac=0.2))
    assert [p.every for p in fitted] == [1, 4]
    assert [name for name, _ in notes] == ["dear", "dear"]


def test_probes_that_share_a_forward_are_thinned_together():
    plan = [Planned("a", 1, ProbeCost(), True), Planned("b", 2, ProbeCost(), True)]
    fitted, _ = fit_plan(plan, SHAPE, Budget(time_frac=0.13))
    # a decides: 9 * 200 = 22.5 %; together at 2 and 4: 5 * 200 = 12.5 %.
    assert [p.every for p in fitted] == [2, 4]


def test_a_probe_that_is_too_dear_even_twice_is_refused_and_no_other():
    plan = [Planned("dear", 8, ProbeCost(forward_tokens=3000)), Planned("cheap", 1, ProbeCost(10))]
    fitted, notes = fit_plan(plan, SHAPE, Budget(time_frac=0.2))
    assert [p.every for p in fitted] == [0, 1]
    assert len(notes) == 1 and notes[0][0] == "dear" and notes[0][1].startswith("refused")


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="mb=0"):
        Budget(mb=0)
    with pytest.raises(ConfigError, match="time_frac=nan must be a number greater than 0"):
        Budget(time_frac=float("nan"))
