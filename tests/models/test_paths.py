"""Tests that sampling, comparing and learning use the numbers of the policy as it is called."""

import copy
from importlib.metadata import version

import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import entropy_per_token, get_logprobs, kl_per_token, log_probs
from rlhf_lab.models import (
    HookedTransformer,
    ModelConfig,
    TransformerWithCritic,
    TransformerWithValueHead,
    compare_with_reference,
    frozen_copy,
    hooked_transformer,
    make_value_head,
    run_policy,
    token_stats,
)
from rlhf_lab.models.hooked_model import final_residuals
from rlhf_lab.models.outputs import reference_logprobs
from rlhf_lab.sampling import SamplingSpec, sample
from tests.small_runs import DEVICE
from tests.transformer_lens_model import to_transformer_lens

TOKENS = torch.tensor([[4, 9, 13, 7, 11, 5], [12, 4, 19, 6, 8, 10], [7, 7, 9, 5, 4, 6]])
PREFIX = 2
LLAMA = {"normalization_type": "RMS", "act_fn": "silu", "gated_mlp": True}
LLAMA |= {"positional_embedding_type": "rotary", "n_key_value_heads": 1}
POST_NORMS = {"use_normalization_before_and_after": True}
MODELS = {
    "GPT-2": {},
    "Llama": LLAMA,
    "OLMo 2": LLAMA | {"norms_after": True, "qk_norm": "all"},
    "Qwen 3": LLAMA | {"qk_norm": "head"},
    "NeoX": {"parallel_attn_mlp": True, "positional_embedding_type": "rotary", "rotary_dim": 4},
    "Gemma 2": LLAMA | {"output_logits_soft_cap": 3.0, "attn_scores_soft_cap": 2.0} | POST_NORMS,
    "window": {"attn_types": ["local", "global"], "window_size": 2},
}


def random_model(**settings):
    sizes = {"n_layers": 2, "d_model": 16, "n_ctx": 16, "d_head": 8, "d_vocab": 20}
    model = HookedTransformer(ModelConfig(**sizes | settings))
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.data = 0.4 * torch.randn(parameter.shape, generator=generator)
    return model.to(DEVICE)


def random_policy(kind=TransformerWithValueHead, **settings):
    policy = kind(random_model(**settings), seed=1)
    for parameter in policy.value_head.parameters():
        parameter.data *= 20
    return policy


def scale(outputs, factor):
    is_tuple = isinstance(outputs, tuple)
    return tuple(factor * x for x in outputs) if is_tuple else factor * outputs


def scale_forward(module, factor):
    forward = module.forward
    module.forward = lambda *inputs, **options: scale(forward(*inputs, **options), factor)


def subclass(module):
    base = type(module)
    double = lambda self, *inputs, **options: 2 * base.forward(self, *inputs, **options)
    module.__class__ = type(f"Double{base.__name__}", (base,), {"forward": double})


def double_output(module):
    module.register_forward_hook(lambda module, inputs, outputs: scale(outputs, 2))


CHANGES = {
    "mlp.forward": lambda p, m: scale_forward(m.blocks[0].mlp, 0),
    "attn.forward": lambda p, m: scale_forward(m.blocks[0].attn, 2),
    "attn.attend": lambda p, m: setattr(m.blocks[0].attn, "attend", lambda q, k, v, mask: 0 * q),
    "mlp.act_fn": lambda p, m: setattr(m.blocks[0].mlp, "act_fn", torch.tanh),
    "unembed": lambda p, m: subclass(m.unembed),
    "ln_final": lambda p, m: subclass(m.ln_final),
    "policy.forward": lambda p, m: scale_forward(p, 2),
    "policy.unembed": lambda p, m: setattr(p, "unembed", lambda hidden: 2 * m.unembed(hidden)),
    "policy hook": lambda p, m: double_output(p),
    "unembed hook": lambda p, m: double_output(m.unembed),
}


def check_paths(policy, reference, atol=2e-5):
    """Compare sampling, comparing and learning with plain calls of the policy."""
    spec, generator = SamplingSpec(4, temperature=1.3), torch.Generator().manual_seed(3)
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
        "reference": get_logprobs(ref_logits, samples.tokens, PREFIX, 1.3),
    }
    compared = compare_with_reference(policy, reference, samples, 1.3, 2)
    residuals = {"reference": reference, "ref_residuals": compared.ref_residuals}
    options = {"attention_mask": samples.attention_mask} | residuals
    learned = run_policy(policy, samples.tokens, PREFIX, 1.3, **options)
    by_reference = reference_logprobs(reference, samples, compared.ref_residuals, 1.3, 2)
    pairs = {
        "logprobs": (samples.logprobs, learned.logprobs),
        "values": (samples.values, learned.values),
        "kl": (compared.kl, learned.kl),
        "entropy": (compared.entropy, learned.entropy),
        "reference": (by_reference,),
    }
    for name, tensors in pairs.items():
        for x in tensors:
            close = {"atol": atol, "rtol": atol, "msg": lambda text, name=name: f"{name}: {text}"}
            torch.testing.assert_close(x.detach().float(), expected[name].float(), **close)


@pytest.fixture(params=["whole", "chunks"])
def logits_at_once(request, monkeypatch):
    if request.param == "chunks":
        monkeypatch.setattr(token_stats, "MAX_LOGITS", 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TransformerWithValueHead, TransformerWithCritic])
@pytest.mark.parametrize("change", CHANGES)
def test_paths_follow_a_changed_policy(change, kind, logits_at_once):
    policy = random_policy(kind)
    reference = frozen_copy(policy.base_model)
    before = policy(TOKENS)[0]
    CHANGES[change](policy, policy.base_model)
    assert (policy(TOKENS)[0].exp() - before.exp()).abs().max() > 1e-3
    check_paths(policy, reference)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TransformerWithValueHead, TransformerWithCritic])
@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS.keys())
def test_paths_agree_for_every_architecture(settings, kind, logits_at_once):
    policy = random_policy(kind, **settings)
    reference = frozen_copy(random_model(**settings))
    with torch.no_grad():
        reference.unembed.W_U.mul_(0.7)
        logits = policy(TOKENS)[0]
        torch.testing.assert_close(policy.base_model(TOKENS), logits, atol=1e-5, rtol=1e-5)
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


def test_padded_vocabulary_changes_no_number(logits_at_once, monkeypatch):
    policy, reference = random_policy(), frozen_copy(random_model(eps=0.1))
    ref_residuals = final_residuals(reference, TOKENS)[:, PREFIX - 1 : -1]
    options = {"reference": reference, "ref_residuals": ref_residuals}
    results = []
    for is_padded in (False, True):
        for module in (hooked_transformer, token_stats):
            monkeypatch.setattr(module, "pads_vocabulary", lambda *sizes, on=is_padded: on)
        outputs = run_policy(policy, TOKENS, PREFIX, 1.3, **options)
        loss = (outputs.logprobs + outputs.values + 0.1 * outputs.entropy - outputs.kl).sum()
        logits = policy(TOKENS)[0]
        assert logits.shape[-1] == policy.base_model.cfg.d_vocab
        gradients = torch.autograd.grad(loss + logits.tanh().sum(), list(policy.parameters()))
        results.append([logits, *vars(outputs).values(), *gradients])
    for plain, padded in zip(*results, strict=True):
        torch.testing.assert_close(padded, plain, atol=2e-6, rtol=1e-5)


def test_vocabulary_is_padded_for_large_products_on_cuda_only():
    pads, cuda = hooked_transformer.pads_vocabulary, torch.device("cuda")
    assert pads(cuda, 64, 50257) and not pads(torch.device("cpu"), 64, 50257)
    for sizes in ((63, 50257), (64, 50304), (64, 1023)):
        assert not pads(cuda, *sizes)
    W_U, b_U = hooked_transformer.pad_vocabulary(torch.ones(2, 65), torch.zeros(65))
    assert W_U.shape == (2, 128) and b_U[65:].eq(-torch.inf).all() and b_U[:65].eq(0).all()


@pytest.mark.parametrize("values", [{"top_k": 3}, {"top_k": 6, "top_p": 0.7}], ids=str)
def test_custom_logprobs_are_renormalized_over_the_support(values):
    policy, spec = random_policy(), SamplingSpec(4, temperature=1.7, **values)
    samples = sample(policy, [[4, 9], [7]], spec, torch.Generator().manual_seed(3))
    common = {"attention_mask": samples.attention_mask, "support": samples.support}
    custom = {"logprobs": lambda *inputs: get_logprobs(*inputs)}
    for options in (common, common | custom):
        found = run_policy(policy, samples.tokens, PREFIX, 1.7, **options).logprobs
        torch.testing.assert_close(found.detach(), samples.logprobs, atol=1e-5, rtol=0)


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


def test_comparison_runs_a_policy_that_got_a_hook_after_sampling():
    policy = random_policy()
    reference = frozen_copy(policy.base_model)
    policy.base_model.unembed.W_U.data *= 1.5
    samples = sample(policy, [[4, 9], [7, 3]], SamplingSpec(4))
    without = compare_with_reference(policy, reference, samples, 1.0, 2).kl
    with policy.hooks([("blocks.0.hook_resid_post", lambda x, hook: x.flip(-1))]):
        kl = compare_with_reference(policy, reference, samples, 1.0, 2).kl
        logits = policy.base_model(samples.tokens), reference(samples.tokens)
        expected = [log_probs(x[:, 1:-1]) for x in logits]
        torch.testing.assert_close(kl, kl_per_token(*expected), atol=1e-4, rtol=1e-4)
    assert (kl - without).abs().max() > 1e-2


def test_start_stop_and_loss_match_hand_computed():
    model = random_model(rotary_dim=4, positional_embedding_type="rotary")
    logits, residual = model(TOKENS), model(TOKENS, stop_at_layer=1)
    torch.testing.assert_close(model(residual, start_at_layer=1), logits)
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, TOKENS[:, 1:, None].to(DEVICE))
    short = torch.ones_like(TOKENS).cumsum(1) < 4
    with pytest.raises(ValueError, match="Unknown return_type='logit'. Choose 'logits', "):
        model(TOKENS, "logit")
    losses = model(TOKENS, "loss"), model(TOKENS, "both", attention_mask=short)[1]
    torch.testing.assert_close(losses, (-logprobs.mean(), -logprobs[:, :2].mean()))
    frequencies, _ = model.rotary["global"]  # 10000 ** -(0 / 4) and 10000 ** -(2 / 4)
    assert frequencies.tolist() == pytest.approx([1.0, 0.01])


@pytest.mark.skipif(
    version("transformer_lens") >= "4", reason="TransformerLens 4 has no HookedTransformer"
)
@pytest.mark.parametrize("settings", [{}, LLAMA], ids=["GPT-2", "Llama"])
def test_a_transformer_lens_model_is_a_policy(settings):
    ours = random_model(**settings).cpu()  # as TransformerLens's
    model = to_transformer_lens(ours)
    policy = TransformerWithValueHead(model, seed=1)
    torch.testing.assert_close(policy(TOKENS)[0], ours(TOKENS), atol=1e-4, rtol=1e-4)
    check_paths(policy, frozen_copy(model))
    assert policy.double().base_model.cfg.dtype == torch.float64
