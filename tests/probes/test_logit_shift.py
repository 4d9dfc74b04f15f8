import numpy as np
import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.probes import AttentionDrift, LogitShift, NeuronRank, attach, default_suite
from rlhf_lab.probes.logit_shift import SITES, attribute_logits
from rlhf_lab.training.capture import capture_activations
from tests.probes.looking import train_soundly
from tests.tiny_models import policy_on


def acts_of(model, tokens, pos=-1, extra=()):
    return capture_activations(model, tokens, [*SITES, *extra], pos)


def random_tokens(model):
    return torch.randint(model.cfg.d_vocab, (4, 7), generator=torch.Generator().manual_seed(2))


def test_the_row_of_a_head_is_its_projection_through_the_norm(gpt2_dir):
    model = policy_on(gpt2_dir).base_model
    acts = acts_of(model, random_tokens(model))
    found = attribute_logits(model, acts, 3, 5)
    z = acts["blocks.1.attn.hook_z"][:, 0].double().numpy()
    head = z @ model.blocks[1].attn.W_O[0].detach().double().numpy()
    head = (head - head.mean(1, keepdims=True)) / acts["ln_final.hook_scale"].double().numpy()
    u = (model.W_U[:, 3] - model.W_U[:, 5]).detach().double().numpy()
    expected = head @ (model.ln_final.w.detach().double().numpy() * u)
    row = found.rows[found.components.index("L1H0")].numpy()
    assert np.abs(row - expected).max() < 1e-6


def observed(run, probe):
    """A record of a run that is over, with the activations that the suite would capture."""
    seen = run.seen()
    policy, reference = seen.ctx.policy.base_model, seen.ctx.reference
    if probe.sites:
        text = seen.text.first(probe.n)
        for acts, model in ((seen.acts, policy), (seen.reference_acts, reference)):
            acts |= capture_activations(model, text.tokens, probe.sites, text.columns(probe.pos))
    return probe.observe(seen)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [LogitShift, AttentionDrift, NeuronRank])
def test_weights_by_word_give_the_weighted_sum_of_pairs(kind, trained_runs, no_type_checks):
    """(0.7 loved + 0.3 so - hated) is 0.7 (loved - hated) + 0.3 (so - hated)."""
    run = trained_runs("adapted")
    fields = {LogitShift: ("shift",), AttentionDrift: ("own", "qk", "wo")}
    weights = {"loved": 0.7, "so": 0.3, "hated": -1}
    found = [
        observed(run, kind(word, *other, n=6)).tensors
        for word, *other in (("loved", "hated"), ("so", "hated"), (weights,))
    ]
    for name in fields.get(kind, ("neuron_contribution",)):
        one, two, group = (tensors[name] for tensors in found)
        assert one.abs().max() > 1e-3
        torch.testing.assert_close(group, 0.7 * one + 0.3 * two, atol=1e-5, rtol=1e-4)


def test_weights_by_word_are_stored_and_validated(make_trainer, reviews):
    trainer = make_trainer()
    probe = LogitShift({"loved": 0.5, "so": 0.5, "hated": -1.0})
    attach(trainer, probe, eval_tokens=reviews[0])
    assert probe.settings()["word"] == "loved, so" and probe.settings()["other"] == "hated"
    with pytest.raises(ConfigError, match="other='hated' cannot be combined"):
        attach(trainer, LogitShift({"loved": 1.0}, "hated", name="two"), eval_tokens=reviews[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "site",
    ["attn.hook_z", "hook_attn_out", "hook_resid_post", "hook_mlp_out"],
)
def test_effect_of_an_intervention_is_a_component(make_trainer, site):
    trainer = make_trainer()
    trainer.intervene(f"blocks.1.{site}", lambda activation, where: activation * 0.5, name="half")
    suite = default_suite(trainer)
    suite.probes += [LogitShift(n=16), AttentionDrift(every=1, n=16)]
    attach(trainer, suite)
    run = train_soundly(trainer)
    assert set(run.probes()) == {probe.name for probe in suite.probes}
    record = run.records("logit_shift")[-1]
    changed = dict(zip(record["components"], record["policy"], strict=True))["hooks"]
    assert (abs(changed) > 1e-5) == (site in ("hook_attn_out", "hook_resid_post"))
    assert "hooks" in run.records("words_moved")[-1]["components"]
    first = run.tensors("attention_drift", 0)
    assert not first["qk"].any() and not first["ov"].any()
    assert first["hooks"][0].abs().max() < 1e-5
    torch.testing.assert_close(first["hooks"][1], first["own"][1], atol=1e-5, rtol=0)
    assert first["hooks"][1].any() == (site == "attn.hook_z")
