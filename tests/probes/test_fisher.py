"""Fisher: the identity of small steps on runs of every kind, and faults that it must tell."""

import pytest

from rlhf_lab.probes import Fisher
from rlhf_lab.views.probe_pictures import probe_html
from tests.probes.faults_fisher import FISHER_FAULTS
from tests.probes.looking import failed, look
from tests.probes.planting import planted

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_type_checks")]


def probe_of(kind: str) -> Fisher:
    return Fisher(n=6, text="rollout" if kind == "padded" else "eval")


@pytest.mark.parametrize("kind", ["adapted", "padded", "grouped"])
def test_every_check_holds_where_nothing_is_wrong(kind, trained_runs):
    record = look(trained_runs(kind), probe_of(kind))
    assert [check for check in record.checks if not check.ok] == []
    first, *_, last = record.values["ratio"]
    assert abs(first - 1) < abs(last - 1)
    assert record.tensors["quad"].sum() > 0


@pytest.mark.parametrize("fault", FISHER_FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_told_by_the_record_s_own_checks(fault, trained_runs):
    kind = "adapted" if fault.run == "plain" else fault.run
    with planted(fault):
        found = failed(trained_runs(kind), probe_of(kind))
    assert found


def test_a_run_with_it_ends_with_the_same_weights_and_is_drawn(run_beside_one_without):
    run = run_beside_one_without(Fisher(every=1), reviews=6, total_phases=1, warmup_steps=0)
    assert run.records("fisher")[0]["ratio"] == [None] * 5
    assert probe_html(run, "fisher").count("<figure") == 2
