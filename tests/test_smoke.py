"""Tests of `make smoke`: methods of the model, and a run with hooks.

It passes with the oldest and the newest TransformerLens that requirements.txt allows.
"""

import pytest
import torch
from transformer_lens import ActivationCache

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import HookedTransformer, TransformerWithValueHead, load_model
from rlhf_lab.training.resume import load_policy

TEXT = "this movie was good"


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return load_model("reel-nano")


@pytest.fixture
def cache(model) -> ActivationCache:
    return model.run_with_cache(model.to_tokens(TEXT))[1]


def count_hooks(model: HookedTransformer) -> int:
    return sum(point.is_hooked for point in model.hook_dict.values())


def test_tokens_and_texts_convert_both_ways(model):
    tokens = model.to_tokens(TEXT)
    assert tokens.shape == (1, 5) and model.to_string(tokens[0, 1:]).strip() == TEXT
    assert model.to_tokens(" good" * model.cfg.n_ctx).shape == (1, model.cfg.n_ctx)
    assert model.to_str_tokens(TEXT)[-1].strip() == "good"
    assert model.to_single_token(" good") == tokens[0, -1]
    torch.testing.assert_close(model(TEXT), model(tokens))


def test_stacked_weights_have_an_axis_of_layers(model):
    cfg = model.cfg
    assert model.W_Q.shape == (cfg.n_layers, cfg.n_heads, cfg.d_model, cfg.d_head)
    assert model.W_O.shape == (cfg.n_layers, cfg.n_heads, cfg.d_head, cfg.d_model)
    assert model.W_in[1].equal(model.blocks[1].mlp.W_in)
    assert model.W_E.shape == model.W_U.T.shape == (cfg.d_vocab, cfg.d_model)


def test_run_with_cache_returns_a_cache_with_every_site(model, cache):
    sites = {name for name in model.hook_dict if not name.endswith("hook_result")}
    assert isinstance(cache, ActivationCache) and set(cache) == sites
    assert cache["pattern", 1].shape == (1, model.cfg.n_heads, 5, 5)
    assert cache["resid_post", -1].equal(cache["blocks.1.hook_resid_post"])


def test_hooks_replace_activations_until_they_are_removed(model):
    def zero(z, hook):
        return torch.zeros_like(z)

    tokens, hook = model.to_tokens(TEXT), ("blocks.0.attn.hook_z", zero)
    before = model(tokens)
    with model.hooks(fwd_hooks=[hook]):
        within = model(tokens)
    assert model(tokens).equal(before) and not within.allclose(before)
    assert model.run_with_hooks(tokens, fwd_hooks=[hook]).equal(within)
    model.add_hook(*hook)
    assert model(tokens).equal(within) and count_hooks(model) == 1
    model.reset_hooks()
    assert model(tokens).equal(before) and count_hooks(model) == 0


def test_residual_components_add_up_to_the_final_residual(model, cache):
    final = cache["resid_post", -1]
    torch.testing.assert_close(cache.decompose_resid().sum(0), final, atol=1e-4, rtol=0)
    torch.testing.assert_close(cache.accumulated_resid()[-1], final)
    heads = cache.stack_head_results()
    biases = model.accumulated_bias(model.cfg.n_layers, include_mlp_biases=False)
    attention = sum(cache["attn_out", layer] for layer in range(model.cfg.n_layers))
    torch.testing.assert_close(heads.sum(0) + biases, attention, atol=1e-4, rtol=0)


def test_logit_attributions_add_up_to_the_logit(model, cache):
    token = model.to_single_token(" good")
    components, labels = cache.decompose_resid(return_labels=True)
    attributions = cache.logit_attrs(components, tokens=token)
    assert len(labels) == len(components) == len(attributions)
    normalized = cache["ln_final.hook_normalized"][0, -1]  # before the norm's weight, not folded
    expected = normalized @ model.W_U[:, token]
    torch.testing.assert_close(attributions[:, 0, -1].sum(), expected, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_run_records_hooks_that_change_activations(model, tmp_path):
    """Not those that only read, and not those of a passed policy."""
    sizes = dict(total_phases=2, batch_size=16, num_minibatches=2, warmup_steps=1, gen_len=6)
    args, seen = RLHFArgs(preset="reel", **sizes), set()
    trainer = RLHFTrainer(args, out=tmp_path / "run")
    policy, (first, second) = trainer.policy, trainer.policy.base_model.blocks
    policy.add_hook("hook_embed", lambda x, hook: seen.add(x.requires_grad) or x)
    policy.add_hook("blocks.0.hook_mlp_out", lambda x, hook: (x.mul_(2), None)[1])
    first.mlp.register_forward_pre_hook(lambda part, inputs: (2 * inputs[0],))
    trainer.run_phase()
    second.register_forward_hook(lambda part, inputs, output: 2 * output)
    trainer.run_phase()
    info = trainer.run.read_info()
    names = {record["name"] for record in info["interventions"]}
    assert names == {"blocks.0.hook_mlp_out", "blocks.0.mlp", "blocks.1"}
    assert seen == {True, False} and info["custom_components"] == ["interventions"]
    for load in (load_policy, RLHFTrainer.resume):
        with pytest.raises(ConfigError, match="was trained with the intervention 'blocks.0"):
            load(trainer.run)
    policy = TransformerWithValueHead(model)
    policy.add_hook("hook_embed", lambda x, hook: 2 * x)
    other = RLHFTrainer(args, out=tmp_path / "other", policy=policy)
    other.run_phase()
    assert not other.run.read_info()["interventions"]
