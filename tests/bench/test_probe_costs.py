"""Costs of probes: a share by hand, the page as stored, and a timed run."""

import pytest

from benchmarks.probe_costs import costs_page, probe_costs
from benchmarks.probes import KEYS, PAGE, RESULTS, TIMED, measure
from benchmarks.records import read_records
from rlhf_lab.errors import ConfigError


def stored(**more: object) -> dict:
    """Phases of 2 s without a probe, and of 1 s with adapters."""
    probes = {
        "Fisher": {"every": 20, "calls": [9.0, 4.0, 3.0], "rest": [2.2]},
        "AdapterReading": {"every": 20, "calls": [1.0], "rest": [1.0]},
        "ComponentTransplant": {"every": None, "calls": [10.0], "rest": [2.0]},
    }
    result = {"work": {"shape": "tiny"}, "plain": [1.0, 2.0, 9.0], "probes": probes}
    result |= {"command": "time them", "left_out": {}, "machine": {"processor": "Abacus"}}
    return result | more


def test_shares_by_hand():
    """4 s in 20 phases of 2 s are a tenth; 1 s in 20 phases of 1 s a twentieth."""
    sheet = probe_costs([stored()])
    assert sheet.body == [
        ["`Fisher`", "20", "4.00", "10.0%"],
        ["`AdapterReading`", "20", "1.00", "5.0%"],
        ["`ComponentTransplant`", "at the end", "10.00", "5.0 phases"],
    ]


def test_two_shapes_stand_side_by_side():
    small = stored(work={"shape": "small"}, plain=[])
    small["probes"] = {"Fisher": {"every": 20, "calls": [100.0], "rest": [50.0]}}
    first, *others = probe_costs([stored(), small]).body
    assert first == ["`Fisher`", "20", "4.00", "10.0%", "100.00", "10.0%"]
    assert [line[-2:] for line in others] == [["", ""], ["", ""]]


def test_the_page_holds_what_is_stored_and_nothing_else():
    page = PAGE.read_text(encoding="utf-8")
    assert page == costs_page(page, read_records(RESULTS, KEYS))


def test_every_probe_is_timed_or_said_to_be_left_out():
    for result in read_records(RESULTS, KEYS)[:1]:
        assert result["probes"].keys() | result["left_out"].keys() == TIMED.keys()


@pytest.mark.slow
def test_a_probe_s_seconds_are_its_own_and_not_the_phase_s(tmp_path):
    """OffPrincipal on two layers takes less than a phase, and each phase has its record."""
    out = tmp_path / "costs.jsonl"
    measure("nano", ("OffPrincipal",), turns=2, eval_texts=8, batch_size=8, out=out)
    (result,) = read_records(out, KEYS)
    (probe,) = result["probes"].values()
    assert probe["every"] == 20 and len(probe["calls"]) == len(result["plain"]) == 2
    assert all(
        0 < call < 5 * phase for call, phase in zip(probe["calls"], probe["rest"], strict=True)
    )


@pytest.mark.parametrize("given", [{"probes": ("Oracle",)}, {"turns": 0}, {"warmups": -1}])
def test_options_that_say_nothing_are_refused(given):
    with pytest.raises(ConfigError, match=next(iter(given))):
        measure("nano", **given)
