"""LensDivergence: where two models part, what is exactly 0, and faults that are told."""

import copy
from types import SimpleNamespace

import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import kl_per_token, log_probs
from rlhf_lab.models import HookedTransformer
from rlhf_lab.probes import LensDivergence
from rlhf_lab.probes.lens_divergence import unchanged_layers
from rlhf_lab.views.probe_pictures import probe_html
from tests.probes.faults_lens_divergence import LENS_DIVERGENCE_FAULTS
from tests.probes.looking import Trained, failed, look
from tests.probes.planting import planted

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_type_checks")]


def probe_of(kind: str) -> LensDivergence:
    return LensDivergence(n=12, text="rollout" if kind == "padded" else "eval")


def with_policy(run: Trained, model: HookedTransformer) -> Trained:
    """A run that has come to another policy."""
    parts = vars(run.ctx) | {"policy": SimpleNamespace(base_model=model)}
    return run._replace(ctx=SimpleNamespace(**parts))


@pytest.mark.parametrize("kind", ["adapted", "padded", "grouped"])
def test_every_check_holds_where_nothing_is_wrong(kind, trained_runs):
    run = trained_runs(kind)
    record = look(run, probe_of(kind))
    assert [check for check in record.checks if not check.ok] == []
    layers = run.ctx.reference.cfg.n_layers + 1
    assert len(record.values["raw"]) == layers and record.values["raw"][-1] > 1e-3
    if kind == "grouped":  # three texts, on which nothing is fitted
        assert "tuned" not in record.tensors
    else:
        assert record.tensors["tuned"].shape[:2] == (layers, 4)
        assert record.values["tuned"][-1] > 1e-3


def test_the_last_layer_is_the_kl_of_whole_logits(trained_runs):
    run = trained_runs("adapted")
    tokens, record = run.tokens[:12], look(run, probe_of("adapted"))
    with torch.no_grad():
        logprobs = [
            log_probs(model(tokens)) for model in (run.ctx.policy.base_model, run.ctx.reference)
        ]
    states = record.tensors["states"]
    expected = kl_per_token(*logprobs) * states
    mean = (expected.sum() / states.sum()).item()
    torch.testing.assert_close(record.tensors["raw"][-1], expected, atol=1e-5, rtol=1e-5)
    assert record.values["raw"][-1] == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize("moved, equal", [("blocks.1.mlp.W_in", 2), ("blocks.0.mlp.W_in", 1)])
def test_layers_in_front_of_what_changed_are_exactly_0(trained_runs, moved, equal):
    """Only one block is another: up to it both lenses say 0, behind it more."""
    run = trained_runs("adapted")
    model = copy.deepcopy(run.ctx.reference)
    with torch.no_grad():
        dict(model.named_parameters())[moved].mul_(1.5)
    assert unchanged_layers(model, run.ctx.reference) == equal
    record = look(with_policy(run, model), probe_of("adapted"))
    assert all(check.ok for check in record.checks), record.checks
    for lens in ("raw", "tuned"):
        assert not record.tensors[lens][:equal].any()
        assert all(x > 0 for x in record.values[lens][equal:])


def test_a_trained_read_out_moves_every_layer(trained_runs):
    run = trained_runs("adapted")
    model = copy.deepcopy(run.ctx.reference)
    with torch.no_grad():
        model.unembed.W_U.mul_(1.5)
    assert unchanged_layers(model, run.ctx.reference) == 0
    assert unchanged_layers(run.ctx.reference, run.ctx.reference) == 3
    record = look(with_policy(run, model), probe_of("adapted"))
    assert all(check.ok for check in record.checks), record.checks
    assert all(x > 0 for x in record.values["raw"])


@pytest.mark.parametrize("fault", LENS_DIVERGENCE_FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_told_by_the_record_s_own_checks(fault, trained_runs):
    kind = "adapted" if fault.run == "plain" else fault.run
    with planted(fault):
        found = failed(trained_runs(kind), probe_of(kind))
    assert found


def test_a_run_with_it_ends_with_the_same_weights_and_is_drawn(run_beside_one_without):
    run = run_beside_one_without(LensDivergence(every=1), reviews=9, total_phases=1, warmup_steps=0)
    first, last = run.records("lens_divergence")
    assert set(first["raw"]) == set(first["tuned"]) == {0.0} and last["raw"][-1] > 0
    html = probe_html(run, "lens_divergence")
    assert html.count("<figure") == 3 and "logit lens, n = 9" in html and "n = 3" in html


def test_what_it_cannot_read_is_refused(make_trainer):
    with pytest.raises(ConfigError, match="text='prompts'"):
        LensDivergence(text="prompts")
    trainer = make_trainer()
    model = trainer.policy.base_model
    model.forward = lambda *inputs, **more: type(model).forward(model, *inputs, **more)
    with pytest.raises(ConfigError, match="forward was replaced"):
        LensDivergence().check_model(model)
