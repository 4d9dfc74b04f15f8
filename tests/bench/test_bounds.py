"""Tests the table of bounds: figures by hand from a stored result, and what was not measured."""

import pytest

from benchmarks.bounds import BOUNDS, Bound, bounds_sheet
from benchmarks.work import Work

MB = 10**6


def contestant(seconds, peak):
    """Two equal phases on a model that takes 100 MB."""
    phase = {"seconds": seconds, "rollout": 0.0, "learning": 0.0, "stages": {}, "peak_bytes": peak}
    return {"phases": [phase, phase], "loaded_bytes": 100 * MB, "versions": {}}


@pytest.fixture
def result():
    """naive takes 6 seconds and 500 MB to our 2 seconds and 180 MB."""
    return {
        "work": {"shape": "tiny", "precision": "fp32"},
        "contestants": {"ours": contestant(2.0, 180 * MB), "naive": contestant(6.0, 500 * MB)},
        "growth": {
            "batch_size": [
                {"batch_size": n, **contestant(s, 0)} for n, s in ((8, 9.0), (16, 1.0), (64, 4.0))
            ],
            "gen_len": [{"gen_len": n, **contestant(s, 0)} for n, s in ((25, 1.0), (100, 16.0))],
        },
    }


def figures(results):
    return {name: rest for name, *rest in bounds_sheet(results).body}


def test_a_ratio_is_their_seconds_over_ours(result):
    """6 / 2 = 3, of the 2.2 that were wanted."""
    assert figures([result])["tiny, fp32: times faster than naive"] == [
        "at least 2.2",
        "3.00",
        "yes",
    ]


def test_growth_with_the_batch_counts_from_16_on(result):
    """From 16 to 64, 4 times the batch, time grows 4 times: 1. The length: 4 times, 16 times: 2."""
    found = figures([result])
    assert found["tiny, fp32: growth with the batch, exponent"] == ["at most 1.05", "1.00", "yes"]
    assert found["tiny, fp32: growth with the length, exponent"] == ["at most 1.05", "2.00", "no"]


def test_memory_is_over_the_models_and_once_without_the_optimizers_state(result):
    """80 MB of 400 are .2. The tiny shape has 4 (12 128^2 + 13 128) + (2048 + 128) 128 + 256 =
    1,071,872 weights, and 2048 128 = 262,144 more in the unembedding: 1,334,016, of 12 bytes each
    16.008 MB, so (80 - 16.008) / (400 - 16.008) = .1667.
    """
    assert Work(**result["work"]).size.n_trained == 1_334_016
    measures = {g.what: g.measure for g in BOUNDS if "memory" in g.what or "same" in g.what}
    values = [measure(result) for measure in measures.values()]
    assert values == [pytest.approx(0.2), pytest.approx(63.991808 / 383.991808)]


def test_what_was_not_measured_is_said(result):
    found = figures([result])
    for name in ("times faster than trl-0.11.4", "share that the default probes add"):
        assert found[f"tiny, fp32: {name}"][1:] == ["not measured", ""]
    assert all(cells[1:] == ["not measured", ""] for cells in figures([]).values())


@pytest.mark.parametrize(
    ("sense", "value", "met"),
    [
        ("at least", 2.0, "yes"),
        ("at least", 1.99, "no"),
        ("at most", 2.0, "yes"),
        ("at most", 2.01, "no"),
    ],
)
def test_a_bound_is_met_at_itself_and_on_the_right_side_of_it(sense, value, met):
    bound = Bound("tiny", "fp32", "x", sense, 2.0, lambda result: value)
    assert bound.row([{"work": {"shape": "tiny", "precision": "fp32"}}]) == [
        "tiny, fp32: x",
        f"{sense} 2",
        f"{value:.2f}",
        met,
    ]


def test_what_one_result_lacks_is_read_from_the_next(result):
    """Growth may be stored apart; where two results have a figure, the first one counts."""
    growth = result.pop("growth")
    alone = {"contestants": {"ours": contestant(1.0, 180 * MB), "naive": contestant(9.0, 0)}}
    later = result | alone | {"growth": growth}
    found = figures([result, later])
    assert found["tiny, fp32: times faster than naive"][1] == "3.00"
    assert found["tiny, fp32: growth with the batch, exponent"][1] == "1.00"
