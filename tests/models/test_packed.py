"""Tests the packed form against the hooked modules: residuals, gradients, decoding, its limits."""

import copy

import pytest
import torch

from rlhf_lab.models import (
    Forward,
    TransformerWithValueHead,
    final_residuals,
    load_model,
    policy_outputs,
    same_weights,
    start_decoding,
)
from rlhf_lab.models.decode import HookedDecoder
from rlhf_lab.models.fast import PASSED, PackedDecoder, packed_residuals, why_unknown
from rlhf_lab.models.transformer_lens import make_model

TOKENS = torch.tensor([[4, 9, 13, 7, 11, 5], [12, 4, 19, 6, 8, 10], [7, 7, 9, 5, 4, 6]])
MASK = torch.tensor([[True] * 6, [False, False, True, True, True, True], [False] * 5 + [True]])


def random_model(**settings):
    cfg = {
        "n_layers": 2,
        "d_model": 16,
        "n_ctx": 16,
        "d_head": 8,
        "n_heads": 2,
        "d_vocab": 20,
        "act_fn": "gelu_new",
        "normalization_type": "LN",
        "seed": 0,
    }
    model = make_model(**(cfg | settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7))
            )
    return model


SHAPES = {
    "gpt2": {},
    "exact gelu": {"act_fn": "gelu"},
    "folded norm": {"normalization_type": "LNPre"},
    "scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
    "llama": {
        "normalization_type": "RMS",
        "act_fn": "silu",
        "gated_mlp": True,
        "positional_embedding_type": "rotary",
        "rotary_dim": 8,
    },
    "grouped heads": {
        "n_heads": 4,
        "d_head": 4,
        "n_key_value_heads": 2,
        "normalization_type": "RMSPre",
        "positional_embedding_type": "rotary",
        "rotary_dim": 4,
    },
    "partly rotated": {
        "positional_embedding_type": "rotary",
        "rotary_dim": 4,
        "rotary_adjacent_pairs": True,
    },
}


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def model(request):
    return random_model(**request.param)


def test_residuals_are_those_of_the_modules(model):
    expected = final_residuals(model, TOKENS)
    assert expected.std() > 0.1
    torch.testing.assert_close(packed_residuals(model, TOKENS), expected, atol=1e-5, rtol=1e-5)


def test_residuals_of_padded_rows_are_those_of_the_modules(model):
    expected = final_residuals(model, TOKENS, MASK)[MASK]
    found = packed_residuals(model, TOKENS, MASK)[MASK]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_every_parameter_gets_the_gradient_of_the_modules(model):
    weights = torch.randn(
        *TOKENS.shape, model.cfg.d_model, generator=torch.Generator().manual_seed(1)
    )
    used = [
        (n, p) for n, p in model.named_parameters() if not n.startswith(("unembed", "ln_final"))
    ]
    names, parameters = zip(*used, strict=True)
    gradients = [
        torch.autograd.grad((residuals * weights).sum(), parameters)
        for residuals in (packed_residuals(model, TOKENS), final_residuals(model, TOKENS))
    ]
    for name, found, expected in zip(names, *gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4, msg=name)


def test_decoding_in_packed_form_sees_what_the_modules_see(model):
    policy = TransformerWithValueHead(model)
    prompts, mask = TOKENS[:, :4], MASK[:, :4].clone()
    mask[2, 3] = True
    with torch.no_grad():
        packed = PackedDecoder(policy, prompts, mask, gen_len=2)
        hooked = HookedDecoder(policy, prompts, mask)
        for step in range(3):
            for found, expected in zip(packed.state[:2], hooked.state[:2], strict=True):
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            if step < 2:
                packed.feed(TOKENS[:, 4 + step])
                hooked.feed(TOKENS[:, 4 + step])


def test_policy_outputs_are_those_of_calling_the_policy(model):
    policy = TransformerWithValueHead(model)
    for found, expected in zip(
        policy_outputs(policy, TOKENS, MASK), policy(TOKENS, MASK), strict=True
    ):
        torch.testing.assert_close(found[MASK], expected[MASK], atol=1e-5, rtol=1e-5)


def test_half_precision_products_stay_close(model):
    """bfloat16 has 8 bits of mantissa: a few per cent after two layers."""
    exact = packed_residuals(model, TOKENS)
    rough = packed_residuals(model, TOKENS, dtype=torch.bfloat16)
    assert rough.dtype == torch.float32
    assert 0 < (rough - exact).norm() / exact.norm() < 0.03


def test_the_bundled_models_run_packed():
    assert Forward().packs(load_model("reel-nano"))


@pytest.mark.parametrize(
    "settings",
    [
        {"attn_only": True},
        {"parallel_attn_mlp": True},
        {"use_qk_norm": True},
        {"use_local_attn": True, "attn_types": ["local", "global"], "window_size": 2},
        {"attn_scores_soft_cap": 5.0},
        {"output_logits_soft_cap": 5.0},
        {"act_fn": "solu_ln"},
        {"normalization_type": None},
        {"positional_embedding_type": "alibi"},
        {"attention_dir": "bidirectional"},
    ],
    ids=str,
)
def test_a_model_of_an_unknown_kind_runs_as_modules(settings):
    assert next(iter(settings)) in why_unknown(random_model(**settings))


def test_a_replaced_part_runs_as_modules():
    model = random_model()
    model.blocks[1].mlp = torch.nn.Identity()
    assert "blocks.1.mlp is a Identity" in why_unknown(model)


class Mine(TransformerWithValueHead):
    """A policy whose forward a learner wrote."""

    def forward(self, input_ids, attention_mask=None, past_kv_cache=None):
        logits, values = super().forward(input_ids, attention_mask, past_kv_cache)
        return 2 * logits, values


def test_a_policy_of_the_learners_own_is_called():
    policy = Mine(random_model())
    prompts, mask = TOKENS[:, :3], torch.ones(3, 3, dtype=torch.bool)
    decoder = start_decoding(policy, prompts, mask, 2)
    expected, _ = policy(prompts)
    torch.testing.assert_close(decoder.state.logits, expected[:, -1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(policy_outputs(policy, prompts)[0], expected)
    assert decoder.state.residual is None


def passed_sites(model):
    blocks = [f"blocks.{layer}.{name}" for layer in range(model.cfg.n_layers) for name in PASSED]
    return ["hook_embed", *blocks]


def overhear(model, run):
    """What passes every hook point of the packed form in a run, and its gradients, by name."""
    heard = {}
    listen = lambda x, hook: heard.setdefault(hook.name, []).append(x.detach())
    hear_gradient = lambda x, hook: heard.setdefault(f"d {hook.name}", []).append(x.detach())
    hooks = [(site, listen) for site in passed_sites(model)]
    back = [(site, hear_gradient) for site in passed_sites(model)]
    with model.hooks(fwd_hooks=hooks, bwd_hooks=back):
        run().square().sum().backward()
    return heard


def test_whoever_listens_hears_what_passes_the_modules(model):
    found = overhear(model, lambda: packed_residuals(model, TOKENS, MASK))
    expected = overhear(model, lambda: final_residuals(model, TOKENS, MASK))
    assert len(found) == 2 * len(passed_sites(model)) and found.keys() == expected.keys()
    for name, values in expected.items():
        (value,), (ours,) = values, found[name]
        assert ours.shape == value.shape, name
        scale = max(1.0, value.abs().max().item())
        torch.testing.assert_close(ours / scale, value / scale, atol=2e-5, rtol=1e-4, msg=name)


def test_whoever_listens_hears_every_token_that_is_decoded(model):
    policy = TransformerWithValueHead(model)
    heard = {PackedDecoder: {}, HookedDecoder: {}}
    everywhere = torch.ones(3, 2, dtype=torch.bool)
    for kind, tokens in heard.items():
        listen = lambda x, hook, to=tokens: to.setdefault(hook.name, []).append(x)
        rest = (2,) if kind is PackedDecoder else ()
        with torch.no_grad(), model.hooks(fwd_hooks=[(s, listen) for s in passed_sites(model)]):
            kind(policy, TOKENS[:, :2], everywhere, *rest).feed(TOKENS[:, 2])
    found, expected = heard.values()
    assert found.keys() == expected.keys() == set(passed_sites(model))
    for name, values in expected.items():
        assert len(values) == 2
        for ours, value in zip(found[name], values, strict=True):
            torch.testing.assert_close(ours, value, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSED)
def test_what_a_hook_returns_goes_on_in_its_place(model, name):
    halve = lambda x, hook: x / 2
    with model.hooks(fwd_hooks=[(f"blocks.0.{name}", halve)]):
        assert Forward().packs(model)
        expected = final_residuals(model, TOKENS)
        found = packed_residuals(model, TOKENS)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert (found - packed_residuals(model, TOKENS)).abs().max() > 1e-3


def test_prompts_of_unequal_lengths_are_decoded_as_modules_for_a_listener():
    policy = TransformerWithValueHead(random_model())
    everywhere, padded = torch.ones_like(MASK), MASK
    listen = ("blocks.0.hook_resid_pre", lambda x, hook: None)
    for mask, hooks, kind in (
        (everywhere, [listen], PackedDecoder),
        (padded, [listen], HookedDecoder),
        (padded, [], PackedDecoder),
    ):
        with policy.base_model.hooks(fwd_hooks=hooks):
            assert type(start_decoding(policy, TOKENS, mask, 2)) is kind


@pytest.mark.parametrize(
    "site", ["hook_pos_embed", "blocks.1.attn.hook_pattern", "unembed.hook_out"]
)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_whoever_listens_elsewhere_is_served_by_the_modules(site, direction):
    policy = TransformerWithValueHead(random_model())
    seen = []
    policy.base_model.add_hook(site, lambda x, hook: seen.append(x.shape[0]), dir=direction)
    assert not Forward().packs(policy.base_model)
    logits, _ = policy_outputs(policy, TOKENS)
    logits.sum().backward()
    start_decoding(policy, TOKENS, torch.ones_like(TOKENS, dtype=torch.bool), 2)
    assert len(seen) == (2 if direction == "fwd" else 1)


def test_a_model_runs_packed_again_when_the_hook_is_gone():
    model = random_model()
    with model.hooks(fwd_hooks=[("ln_final.hook_scale", lambda x, hook: None)]):
        assert not Forward("auto").packs(model)
    assert Forward().packs(model)


def test_a_hook_on_the_final_norm_changes_the_value_that_is_sampled_with():
    policy = TransformerWithValueHead(random_model())
    policy.base_model.add_hook("ln_final.hook_normalized", lambda x, hook: torch.zeros_like(x))
    decoder = start_decoding(policy, TOKENS, torch.ones_like(TOKENS, dtype=torch.bool), 2)
    zero = torch.zeros(1, policy.base_model.cfg.d_model)
    expected = policy.value_head(zero)[0, 0].expand(3)
    torch.testing.assert_close(decoder.state.value, expected)


def test_weights_are_the_same_until_one_bit_differs():
    model = random_model()
    other = copy.deepcopy(model)
    assert same_weights(model, other)
    with torch.no_grad():
        other.blocks[1].mlp.W_in[0, 0] += 1e-6
    assert not same_weights(model, other)
