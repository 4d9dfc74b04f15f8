"""OffPrincipal: shares of planted changes, a run that is left alone, and faults that are told."""

import pytest

from rlhf_lab.errors import ConfigError
from rlhf_lab.probes import OffPrincipal
from rlhf_lab.views.probe_pictures import probe_html
from tests.probes.faults_off_principal import OFF_PRINCIPAL_FAULTS
from tests.probes.looking import failed, look
from tests.probes.planting import planted

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_type_checks")]


@pytest.mark.parametrize("kind", ["adapted", "padded", "grouped"])
def test_every_check_holds_where_nothing_is_wrong(kind, trained_runs):
    record = look(trained_runs(kind), OffPrincipal(k=4))
    assert [check for check in record.checks if not check.ok] == []
    model = trained_runs(kind).ctx.reference
    heads = model.cfg.n_layers * model.cfg.n_heads
    rows = record.values["rows"]
    assert sum(row["name"].endswith((" OV", " QK")) for row in rows) == 2 * heads
    moved = [row for row in rows if row["share"] is not None]
    assert moved and all(0 <= row["share"] <= min(row["left"], row["right"]) for row in moved)
    if kind == "adapted":  # W_out and the embeddings are frozen
        assert all(r["times"] is None for r in rows if r["name"].endswith(("W_out", "embed.W_E")))


@pytest.mark.parametrize("fault", OFF_PRINCIPAL_FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_told_by_the_record_s_own_checks(fault, trained_runs):
    kind = "padded" if fault.run == "plain" else fault.run
    with planted(fault):
        found = failed(trained_runs(kind), OffPrincipal(k=4, draws=4))
    assert found


def test_a_run_with_it_ends_with_the_same_weights_and_is_drawn(run_beside_one_without):
    run = run_beside_one_without(OffPrincipal(every=1), total_phases=1, warmup_steps=0)
    first, last = run.records("off_principal")
    assert first["share"] is None and last["share"] > 0
    html = probe_html(run, "off_principal")
    assert html.count("<figure") == 3 and "n = 20 draws" in html


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="k=0"):
        OffPrincipal(k=0)
    with pytest.raises(ConfigError, match="draws=0"):
        OffPrincipal(draws=0)
