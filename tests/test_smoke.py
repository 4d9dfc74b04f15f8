"""Tests of `make smoke`: methods of the model, and a run with hooks.

It passes with the oldest and the newest TransformerLens that requirements.txt allows.
"""

import pytest
import torch
from transformer_lens import ActivationCache

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.models import HookedTransformer, load_model

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
def test_a_run_of_two_phases_calls_hooks_in_rollout_and_learning():
    sizes = dict(total_phases=2, batch_size=16, num_minibatches=2, warmup_steps=1, gen_len=6)
    trainer = RLHFTrainer(RLHFArgs(preset="reel", **sizes))
    with_gradient = set()
    see = lambda x, hook: with_gradient.add(x.requires_grad)
    trainer.policy.base_model.add_hook("blocks.0.attn.hook_pattern", see)
    with pytest.warns(UserWarning, match="does not store hooks .*use trainer.intervene"):
        reports = trainer.train()
    assert len(reports) == 2 and with_gradient == {True, False}
    assert reports[0].kl_per_sequence == pytest.approx(0, abs=1e-5)
