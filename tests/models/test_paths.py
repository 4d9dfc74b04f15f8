"""Tests that sampling, comparing and learning use the numbers of the policy as it is called."""

import copy
from importlib.metadata import version

import pytest
import torch
from torch import nn

from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import entropy_per_token, get_logprobs, kl_per_token, log_probs
from rlhf_lab.models import (
    TransformerWithCritic,
    TransformerWithValueHead,
    compare_with_reference,
    frozen_copy,
    make_model,
    make_value_head,
    reference_logprobs,
    run_policy,
    token_stats,
)
from rlhf_lab.sampling import SamplingSpec, sample
from tests.transformer_lens_model import to_transformer_lens

TOKENS = torch.tensor([[4, 9, 13, 7, 11, 5], [12, 4, 19, 6, 8, 10], [7, 7, 9, 5, 4, 6]])
PREFIX, LAYERS = 2, 2
LLAMA = {
    "normalization_type": "RMS",
    "act_fn": "silu",
    "gated_mlp": True,
    "positional_embedding_type": "rotary",
    "n_key_value_heads": 1,
}
MODELS = {
    "GPT-2": {},
    "Llama": LLAMA,
    "OLMo 2": LLAMA | {"norms_after": True, "qk_norm": "all"},
    "Qwen 3": LLAMA | {"qk_norm": "head"},
    "NeoX": {"parallel_attn_mlp": True, "positional_embedding_type": "rotary", "rotary_dim": 4},
    "caps": {"output_logits_soft_cap": 3.0, "attn_scores_soft_cap": 2.0},
    "window": {"attn_types": ["local", "global"], "window_size": 2},
}


def random_model(**settings):
    sizes = {"n_layers": LAYERS, "d_model": 16, "n_ctx": 16, "d_head": 8, "n_heads": 2}
    model = make_model(**(sizes | {"d_vocab": 20, "act_fn": "gelu_new"} | settings))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model


def random_policy(kind=TransformerWithValueHead, **settings):
    policy = kind(random_model(**settings), seed=1)
    with torch.no_grad():
        for parameter in policy.value_head.parameters():
            parameter.mul_(20)
    return policy


def scale_forward(module, factor):
    forward = module.forward
    module.forward = lambda *inputs, **options: scale(forward(*inputs, **options), factor)


def scale(outputs, factor):
    if isinstance(outputs, tuple):
        return tuple(factor * output for output in outputs)
    return factor * outputs


def subclass(module):
    base = type(module)
    double = lambda self, *inputs, **options: 2 * base.forward(self, *inputs, **options)
    module.__class__ = type(f"Double{base.__name__}", (base,), {"forward": double})


CHANGES = {
    "mlp.forward": lambda p: scale_forward(p.base_model.blocks[0].mlp, 0),
    "attn.forward": lambda p: scale_forward(p.base_model.blocks[0].attn, 2),
    "block.forward": lambda p: scale_forward(p.base_model.blocks[0], 2),
    "attn.attend": lambda p: setattr(
        p.base_model.blocks[0].attn, "attend", lambda q, k, v, mask: 0 * q
    ),
    "mlp.act_fn": lambda p: setattr(p.base_model.blocks[0].mlp, "act_fn", torch.tanh),
    "embed": lambda p: subclass(p.base_model.embed),
    "pos_embed": lambda p: subclass(p.base_model.pos_embed),
    "unembed": lambda p: subclass(p.base_model.unembed),
    "ln_final": lambda p: subclass(p.base_model.ln_final),
    "model.forward": lambda p: scale_forward(p.base_model, 2),
    "policy.forward": lambda p: scale_forward(p, 2),
    "policy.unembed": lambda p: setattr(
        p, "unembed", lambda hidden: 2 * p.base_model.unembed(hidden)
    ),
    "policy hook": lambda p: p.register_forward_hook(lambda module, x, out: scale(out, 2)),
    "unembed hook": lambda p: p.base_model.unembed.register_forward_hook(
        lambda module, x, out: 2 * out
    ),
}


def check_paths(policy, reference, atol=2e-5):
    """Compare sampling, comparing and learning with plain calls of the policy."""
    generator = torch.Generator().manual_seed(3)
    spec = SamplingSpec(4, temperature=1.3)
    samples = sample(policy, [[4, 9], [7], [12, 5]], spec, generator)
    texts, states = (samples.tokens, samples.attention_mask), slice(PREFIX - 1, -1)
    with torch.no_grad():
        logits, values = policy(*texts)
        ref_logits = TransformerWithValueHead(reference)(*texts)[0]
    logprobs, ref_logprobs = (log_probs(x[:, states], 1.3) for x in (logits, ref_logits))
    expected = {
        "logprobs": get_logprobs(logits, samples.tokens, PREFIX, 1.3),
        "values": values[:, states],
        "kl": kl_per_token(logprobs, ref_logprobs),
        "entropy": entropy_per_token(logprobs),
    }
    compared = compare_with_reference(policy, reference, samples, 1.3, 2)
    residuals = compared.ref_residuals
    options = {"reference": reference, "ref_residuals": residuals}
    out = run_policy(
        policy, texts[0], PREFIX, 1.3, attention_mask=samples.attention_mask, **options
    )
    of_reference = reference_logprobs(reference, samples, residuals, 1.3, 2)
    pairs = {
        "logprobs": (samples.logprobs, out.logprobs),
        "values": (samples.values, out.values),
        "kl": (compared.kl, out.kl),
        "entropy": (compared.entropy, out.entropy),
        "reference": (of_reference, of_reference),
    }
    expected["reference"] = get_logprobs(ref_logits, samples.tokens, PREFIX, 1.3)
    for name, pair in pairs.items():
        for found in pair:
            close = {"atol": atol, "rtol": atol, "msg": lambda text, name=name: f"{name}: {text}"}
            torch.testing.assert_close(found.detach().float(), expected[name].float(), **close)


@pytest.fixture(params=["whole", "chunks"])
def logits_at_once(request, monkeypatch):
    if request.param == "chunks":
        monkeypatch.setattr(token_stats, "MAX_LOGITS", 0)


@pytest.mark.parametrize("kind", [TransformerWithValueHead, TransformerWithCritic])
@pytest.mark.parametrize("change", CHANGES)
def test_paths_follow_a_changed_policy(change, kind, logits_at_once):
    policy = random_policy(kind)
    reference = frozen_copy(policy.base_model)
    before = policy(TOKENS)[0]
    CHANGES[change](policy)
    assert (policy(TOKENS)[0].exp() - before.exp()).abs().max() > 1e-3
    check_paths(policy, reference)


@pytest.mark.parametrize("kind", [TransformerWithValueHead, TransformerWithCritic])
@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS.keys())
def test_paths_agree_for_every_architecture(settings, kind, logits_at_once):
    policy = random_policy(kind, **settings)
    reference = frozen_copy(random_model(**settings))
    with torch.no_grad():
        reference.unembed.W_U.mul_(0.7)
    check_paths(policy, reference)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [TransformerWithValueHead, TransformerWithCritic])
def test_paths_agree_in_half_precision(dtype, kind):
    policy = kind(random_model(), make_value_head(16, seed=1))
    exact = copy.deepcopy(policy)(TOKENS)
    policy.to(dtype)
    reference = frozen_copy(policy.base_model)
    for found, expected in zip(policy(TOKENS), exact, strict=True):
        error = (found.float() - expected).abs().max()
        assert error < 0.1 * expected.abs().max().clamp(min=1)
    check_paths(policy, reference, atol=0.15)
    with policy.base_model.hooks([("ln_final.hook_scale", lambda x, hook: None)]):
        check_paths(policy, reference, atol=0.15)


def test_kl_is_exactly_zero_for_equal_weights():
    policy = random_policy()
    reference = frozen_copy(policy.base_model)
    for hooks in ([], [("blocks.0.hook_resid_post", lambda x, hook: None)]):
        with policy.base_model.hooks(hooks):
            samples = sample(policy, [[4, 9], [7]], SamplingSpec(5))
            kl = compare_with_reference(policy, reference, samples, 1.0, 2).kl
        assert torch.equal(kl, torch.zeros_like(kl))


def test_frozen_copy_raises_on_forward_that_calls_the_original():
    model = random_model()
    scale_forward(model.blocks[0].mlp, 0)
    with pytest.raises(ConfigError, match=r"^base_model\.blocks\.0\.mlp\.forward .* reference="):
        frozen_copy(model)
    model.blocks[0].mlp.forward = lambda x: torch.zeros_like(x)
    assert frozen_copy(model).blocks[0].mlp(torch.ones(1, 1, 16)).abs().max() == 0


@pytest.mark.slow
def test_rotary_positions_have_no_limit_before_n_ctx():
    policy = random_policy(**LLAMA | {"n_ctx": 4096, "n_layers": 1})
    tokens = torch.randint(20, (1, 2060), generator=torch.Generator().manual_seed(0))
    spec, generator = SamplingSpec(4), torch.Generator().manual_seed(0)
    samples = sample(policy, [tokens[0, :2046].tolist()], spec, generator)
    expected = get_logprobs(policy(samples.tokens)[0], samples.tokens, 2046)
    torch.testing.assert_close(samples.logprobs, expected.detach(), atol=1e-4, rtol=1e-4)


def test_value_head_can_be_any_module():
    policy = TransformerWithValueHead(random_model(), nn.Linear(16, 1))
    check_paths(policy, frozen_copy(policy.base_model))


@pytest.mark.skipif(
    version("transformer_lens") >= "4", reason="TransformerLens 4 has no HookedTransformer"
)
@pytest.mark.parametrize("settings", [{}, LLAMA], ids=["GPT-2", "Llama"])
def test_a_transformer_lens_model_is_a_policy(settings):
    model = to_transformer_lens(random_model(**settings))
    policy = TransformerWithValueHead(model, seed=1)
    check_paths(policy, frozen_copy(model))
