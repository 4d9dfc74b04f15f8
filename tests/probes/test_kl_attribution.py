"""KLAttribution: both sums on runs of every kind, and faults that it must tell."""

import pytest
import torch

from rlhf_lab.probes import KLAttribution
from rlhf_lab.views.probe_pictures import probe_html
from tests.probes.faults_kl_attribution import KL_FAULTS
from tests.probes.looking import failed, look
from tests.probes.planting import planted

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_type_checks")]
DEFAULT = {"plain": "adapted", "lora": "adapted"}


def probe_of(kind: str) -> KLAttribution:
    return KLAttribution(n=8, text="rollout" if kind == "padded" else "eval")


@pytest.mark.parametrize("kind", ["adapted", "padded", "grouped"])
def test_every_check_holds_where_nothing_is_wrong(kind, trained_runs):
    record = look(trained_runs(kind), probe_of(kind))
    assert [check for check in record.checks if not check.ok] == []
    output, weights = record.tensors["output"], record.tensors["weights"]
    kl = record.tensors["kl"]
    assert kl.mean() > 1e-3
    torch.testing.assert_close(output.sum(0), kl, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(weights.sum(), kl.sum(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("fault", KL_FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_told_by_the_record_s_own_checks(fault, trained_runs):
    kind = DEFAULT.get(fault.run, fault.run)
    with planted(fault):
        found = failed(trained_runs(kind), probe_of(kind))
    assert found


def test_a_run_with_it_ends_with_the_same_weights_and_is_drawn(run_beside_one_without):
    run = run_beside_one_without(KLAttribution(every=1), reviews=8, total_phases=1, warmup_steps=0)
    first, last = run.records("kl_attribution")
    assert set(first["output"]) == set(first["weights"]) == {0.0}
    assert sum(last["weights"]) == pytest.approx(last["kl"], rel=1e-3) and last["kl"] > 0
    html = probe_html(run, "kl_attribution")
    assert html.count("<figure") == 3
    assert "through which output" in html and "by whose weights" in html
