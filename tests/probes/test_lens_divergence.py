"""LensDivergence: where two models part, what is exactly 0."""

import copy
from types import SimpleNamespace

import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import kl_per_token, log_probs
from rlhf_lab.models import HookedTransformer
from rlhf_lab.probes import LensDivergence
from rlhf_lab.probes.lens_divergence import unchanged_layers
from rlhf_lab.probes.text_rows import text_rows
from rlhf_lab.probes.tuned_lens import fit_translator, ridge_errors
from rlhf_lab.views.probe_pictures import probe_html
from tests.probes.looking import Trained, row_alone, sound

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_type_checks")]


def probe_of(kind: str) -> LensDivergence:
    return LensDivergence(n=12, text="rollout" if kind == "padded" else "eval")


def with_policy(run: Trained, model: HookedTransformer) -> Trained:
    """A run that has come to another policy."""
    parts = vars(run.ctx) | {"policy": SimpleNamespace(base_model=model)}
    return run._replace(ctx=SimpleNamespace(**parts))


@torch.no_grad()
def check(kind: str, run: Trained) -> None:
    """Compare some texts, run alone up to each layer, with stored rows through both lenses."""
    probe = probe_of(kind)
    record = sound(run, probe)
    values, stored = record.values, record.tensors
    models, rows = (
        (run.ctx.policy.base_model, run.ctx.reference),
        text_rows(run.seen(), probe.text, 12),
    )
    layers, cut = models[0].cfg.n_layers + 1, 2 * len(rows.tokens) // 3

    def stop(model, row: int, layer: int) -> torch.Tensor:
        return model(row_alone(rows, row)[0], stop_at_layer=layer)[0]

    def assert_row(stored: torch.Tensor, row: int, layer: int, translate=lambda h: h) -> None:
        states = row_alone(rows, row)[1]
        logs = [
            log_probs(m.unembed(m.ln_final(translate(stop(m, row, layer))[None]))) for m in models
        ]
        expected = kl_per_token(*logs)[0] * states
        torch.testing.assert_close(stored[: len(states)], expected, atol=2e-5, rtol=1e-3)

    assert values["layers"] == ["embed", *(f"L{layer}" for layer in range(layers - 1))]
    if kind == "adapted":  # of the next token, after a prompt of three
        assert values["slots"][2:4] == ["OPEN", "COMMA"]
    for layer in range(layers):
        for row in (0, 2):
            assert_row(stored["raw"][layer, row], row, layer)
    for lens in values.keys() & {"raw", "tuned"}:
        sums, counts = stored[lens].sum((1, 2)), stored["states"][-stored[lens].shape[1] :].sum()
        assert values[lens] == pytest.approx((sums / counts).tolist(), abs=1e-5)
    assert values["raw"][-1] > 1e-3 and ("tuned" in values) == (kind != "grouped")
    if "tuned" in values:
        assert values["held_out"] == len(rows.tokens) - cut == stored["tuned"].shape[1]
        for layer in range(layers - 1):
            x, y = (
                torch.cat([stop(models[1], row, at) for row in range(cut)])[None]
                for at in (layer, layers - 1)
            )
            everywhere = torch.ones(y.shape[:2], dtype=torch.bool)
            translate = fit_translator(x, y, everywhere, values["tuned_ridge"])
            assert_row(stored["tuned"][layer, 1], cut + 1, layer, translate)
    if kind == "adapted":  # texts of one length
        ridges = [values["tuned_ridge"]]
        for layer, left in zip(values["tuned_layers"], values["tuned_left"], strict=True):
            x, y = (
                torch.cat([stop(models[1], row, at) for row in range(cut)]).reshape(cut, -1, 64)
                for at in (layer, layers - 1)
            )
            mask = torch.ones(y.shape[:2], dtype=torch.bool)
            expected = ridge_errors(x, y, mask, pooled=True, ridges=ridges).item()
            assert left == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("kind", ["adapted", "padded", "grouped"])
def test_layers_are_read_as_in_forwards_that_stop_there(kind, trained_runs):
    check(kind, trained_runs(kind))


@pytest.mark.parametrize("moved, equal", [("blocks.1.mlp.W_in", 2), ("blocks.0.mlp.W_in", 1)])
def test_layers_in_front_of_what_changed_are_exactly_0(trained_runs, moved, equal):
    """Only one block is another: up to it both lenses say 0, behind it more."""
    run = trained_runs("adapted")
    model = copy.deepcopy(run.ctx.reference)
    with torch.no_grad():
        dict(model.named_parameters())[moved].mul_(1.5)
    assert unchanged_layers(model, run.ctx.reference) == equal
    record = sound(with_policy(run, model), probe_of("adapted"))
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
    record = sound(with_policy(run, model), probe_of("adapted"))
    assert all(x > 0 for x in record.values["raw"])


def test_a_run_with_it_ends_with_the_same_weights_and_is_drawn(run_with_and_without):
    run = run_with_and_without(LensDivergence(every=1), reviews=9, total_phases=1, warmup_steps=0)
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
