import random

import numpy as np
import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.training.callbacks import no_side_effects
from rlhf_lab.training.capture import capture_activations, resolve_sites

POST = "blocks.1.hook_resid_post"


def test_a_capture_is_what_the_model_computes(reel_policy, reviews):
    tokens, _ = reviews
    acts = capture_activations(reel_policy, tokens, [POST, "values", "logits"], pos=3)
    _, cache = reel_policy.base_model.run_with_cache(tokens)
    logits, values = reel_policy(tokens)
    torch.testing.assert_close(acts[POST], cache[POST][:, 3])
    torch.testing.assert_close(acts["values"], values[:, 3])
    torch.testing.assert_close(acts["logits"], logits[:, 3])


def test_rows_beyond_one_chunk_are_all_there_in_order(reel_policy, truth):
    tokens, _ = truth.reviews(70, seed=1)
    at = torch.arange(70) % tokens.shape[1]
    whole = capture_activations(reel_policy, tokens, [POST], at)[POST]
    last = capture_activations(reel_policy, tokens[68:], POST, at[68:])[POST]
    torch.testing.assert_close(whole[68:], last)


def test_wildcards_are_spelt_out_in_the_order_of_the_model(model):
    found = resolve_sites(model, ["blocks.*.hook_mlp_out", "hook_embed", "values"])
    assert found == ["hook_embed", "blocks.0.hook_mlp_out", "blocks.1.hook_mlp_out", "values"]


@pytest.mark.parametrize("part", ["pattern", "attn_scores"])
def test_patterns_of_unequal_prompts_equal_those_of_each_alone(reel_policy, reviews, part):
    """Three rows of 8, 5 and 1 tokens: padding neither sees nor is seen."""
    site, lengths, seq = f"blocks.1.attn.hook_{part}", (8, 5, 1), 8
    rows = [reviews[0][row, :length] for row, length in enumerate(lengths)]
    tokens = torch.stack([torch.nn.functional.pad(row, (seq - len(row), 0)) for row in rows])
    mask = torch.stack([torch.arange(seq) >= seq - length for length in lengths])
    found = capture_activations(reel_policy, tokens, [POST, site], attention_mask=mask)
    assert found[POST].shape == (3, seq, 64) and found[site].shape == (3, 4, seq, seq)
    for row, length, whole in zip(rows, lengths, found[site], strict=True):
        alone = capture_activations(reel_policy, row[None], [site])[site][0]
        torch.testing.assert_close(whole[:, -length:, -length:], alone)
        assert not whole[:, : seq - length].any()
        unseen = whole[:, -length:, : seq - length]
        assert (unseen == (0 if part == "pattern" else -torch.inf)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, message",
    [
        ({"at": "run_end"}, "Pass tokens="),
        ({"hook_names": "blocks.7.hook_resid_post"}, "does not have"),
        ({"hook_names": "blocks.*.attn.hook_pattern", "pos": -1}, r"pos=None, .* in acts\[site"),
        ({"pos": "verb"}, "pos='verb' is not a position.*'last'"),
    ],
)
def test_invalid_captures_raise(make_trainer, options, message, no_type_checks):
    with pytest.raises(ConfigError, match=message):
        make_trainer().capture(**({"hook_names": POST} | options))


def vandalize(policy: TransformerWithValueHead) -> None:
    """Touch everything that a run depends on."""
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    policy.train()
    policy.base_model.blocks[0].eval()
    policy.base_model.reset_hooks(including_permanent=True)
    policy.base_model.add_hook(POST, lambda act, hook: act * 2)
    with torch.enable_grad():
        policy(torch.zeros(1, 3, dtype=torch.long))[0].sum().backward()


@pytest.mark.parametrize("raises", [False, True])
def test_undisturbed_puts_everything_back(reel_policy, raises):
    policy, model = reel_policy, reel_policy.base_model
    policy.eval()
    calls = []
    model.add_hook("hook_embed", lambda act, hook: calls.append(act.shape))
    gradient = torch.ones_like(model.embed.W_E)
    model.embed.W_E.grad = gradient
    random.seed(123), random.random()
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()[1][:-1]
    expected = RuntimeError if raises else ConfigError
    with pytest.raises(expected, match="for itself" if raises else "hooks of .* were changed"):
        with no_side_effects(policy):
            vandalize(policy)
            if raises:
                raise RuntimeError("for itself")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    # beartype draws from `random` too, which moves the last entry (the place in the state) only.
    assert random.getstate()[1][:-1] == before[2]
    assert not any(module.training for module in policy.modules())
    assert model.embed.W_E.grad is gradient and bool((gradient == 1).all())
    assert all(p.grad is None for p in policy.parameters() if p is not model.embed.W_E)
    policy(torch.zeros(1, 3, dtype=torch.long))
    assert calls[-1] == (1, 3, 64)
    assert not model.hook_dict[POST].fwd_hooks
    model.reset_hooks()
    calls.clear()
    policy(torch.zeros(1, 3, dtype=torch.long))
    assert not calls
    model.embed.W_E.grad = None


def test_each_sequence_has_a_position_of_its_own(reel_policy, reviews):
    """Row 0 at 3, row 1 at the end, row 2 at 0: as cut out of all positions."""
    tokens, at = reviews[0][:3], torch.tensor([3, -1, 0])
    whole = capture_activations(reel_policy, tokens, [POST, "values"])
    found = capture_activations(reel_policy, tokens, [POST, "values"], at)
    for name, x in whole.items():
        torch.testing.assert_close(found[name], torch.stack([x[0, 3], x[1, -1], x[2, 0]]))
    for outside in (29, torch.tensor([3, 99, 0])):
        with pytest.raises(IndexError, match="out of bounds"):
            capture_activations(reel_policy, tokens, [POST], outside)


@pytest.mark.slow
def test_captures_during_a_run_have_their_phases_and_positions(make_trainer, reviews):
    """Shorter prompts are padded at the start, and responses that end early at the end."""
    fields = {"temperature": 20.0, "gen_len": 27, "batch_size": 16, "total_phases": 3}
    parts = {"prompts": ["this movie", "the film was"]}
    trainer, seen = make_trainer(parts, **fields, stop_at_eos=True), []

    @trainer.capture(POST, pos=5, every=2)
    def sparse(ctx, acts):
        seen.append((ctx.phase, tuple(acts.shape)))

    @trainer.capture("blocks.*.hook_resid_post", at="after_rollout")
    def whole(ctx, acts):
        seen.append(acts)

    @trainer.capture(POST, pos="last", at="after_score")
    def last(ctx, acts):
        seen.append((ctx.rollout.samples, acts))

    @trainer.capture(POST, "last", at="run_end", tokens=reviews[0])
    def fixed_text(ctx, acts):
        seen.append(acts)

    trainer.train()
    all_layers, (samples, acts), first, _, _, _, _, third, of_reviews = seen
    assert (first, third) == ((0, (16, 64)), (2, (16, 64)))
    assert {name: x.shape for name, x in all_layers.items()} == dict.fromkeys(
        ("blocks.0.hook_resid_post", POST), (16, 31, 64)
    )
    lengths = samples.mask.sum(1)
    assert lengths.min() < lengths.max()
    at = samples.prefix_len + lengths - 1
    torch.testing.assert_close(acts, all_layers[POST][torch.arange(len(at)), at])
    expected = capture_activations(trainer.policy, reviews[0], [POST])[POST]
    torch.testing.assert_close(of_reviews, expected[:, -1])
