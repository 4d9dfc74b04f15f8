"""Tests what runs packed and what does not: right numbers through every door, or one sentence."""

import copy
import warnings

import pytest
import torch
from torch import nn

from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.functional import entropy_per_token, get_logprobs, kl_per_token, log_probs
from rlhf_lab.models import (
    Forward,
    TransformerWithCritic,
    TransformerWithValueHead,
    compare_with_reference,
    frozen_copy,
    load_model,
    make_value_head,
    reference_logprobs,
    run_policy,
)
from rlhf_lab.models.fast import why_unknown
from rlhf_lab.models.transformer_lens import HookPoint, make_model
from rlhf_lab.sampling import SamplingSpec, sample

TOKENS = torch.tensor([[4, 9, 13, 7, 11, 5], [12, 4, 19, 6, 8, 10], [7, 7, 9, 5, 4, 6]])
MASK = torch.tensor([[True] * 6, [False] + [True] * 5, [True] * 6])
PREFIX, LAYERS = 2, 2
LLAMA = {
    "normalization_type": "RMS",
    "act_fn": "silu",
    "gated_mlp": True,
    "positional_embedding_type": "rotary",
    "rotary_dim": 8,
}


def random_model(**settings):
    sizes = {"n_layers": LAYERS, "d_model": 16, "n_ctx": 16, "d_head": 8, "n_heads": 2}
    defaults = sizes | {"d_vocab": 20, "act_fn": "gelu_new", "seed": 0}
    model = make_model(**(defaults | settings))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model


def random_policy(**settings):
    policy = TransformerWithValueHead(random_model(**settings), seed=1)
    with torch.no_grad():
        for parameter in policy.value_head.parameters():
            parameter.mul_(20)
    return policy


def patch(part, scale):
    """Let a part's forward give `scale` times what it gave."""
    forward = part.forward
    part.forward = lambda *inputs, **more: _scaled(forward(*inputs, **more), scale)


def _scaled(outputs, scale):
    if isinstance(outputs, tuple):
        return tuple(scale * output for output in outputs)
    return scale * outputs


def subclass(part):
    """Make a part one of a class with a forward of its own."""
    own = type(part)
    twice = lambda self, *inputs, **more: 2 * own.forward(self, *inputs, **more)
    part.__class__ = type(f"Twice{own.__name__}", (own,), {"forward": twice})


class Twice(HookPoint):
    """A hook point that is not the identity."""

    def forward(self, x):
        return 2 * x


def local_attention(policy):
    policy.base_model.cfg.window_size = 2
    policy.base_model.blocks[0].attn.attn_type = "local"


def a_forward_hook(policy):
    double = lambda module, inputs, outputs: _scaled(outputs, 2)
    policy.register_forward_hook(double)


CHANGES = {
    "an MLP's forward": (lambda p: patch(p.base_model.blocks[0].mlp, 0), "block 0's MLP"),
    "attention's forward": (lambda p: patch(p.base_model.blocks[0].attn, 2), "block 0's attention"),
    "a block's forward": (lambda p: patch(p.base_model.blocks[0], 2), "block 0"),
    "the last block's forward": (lambda p: patch(p.base_model.blocks[-1], 2), None),
    "a method of attention": (
        lambda p: setattr(p.base_model.blocks[0].attn, "calculate_z_scores", _no_attention),
        "block 0's attention",
    ),
    "an activation": (
        lambda p: setattr(p.base_model.blocks[0].mlp, "act_fn", torch.tanh),
        "block 0's MLP",
    ),
    "an embedding": (lambda p: subclass(p.base_model.embed), "the embedding"),
    "a position embedding": (lambda p: subclass(p.base_model.pos_embed), "the embedding"),
    "an unembedding": (lambda p: subclass(p.base_model.unembed), "the unembedding"),
    "a final norm": (lambda p: subclass(p.base_model.ln_final), "the final norm"),
    "fewer layers in cfg": (lambda p: setattr(p.base_model.cfg, "n_layers", 1), "block 1"),
    "local attention": (local_attention, "block 0's attention"),
    "a hook point of an MLP": (
        lambda p: setattr(p.base_model.blocks[0], "hook_mlp_out", Twice()),
        "block 0's MLP",
    ),
    "a hook point of positions": (
        lambda p: setattr(p.base_model, "hook_pos_embed", Twice()),
        "the embedding",
    ),
    "the model's forward": (lambda p: patch(p.base_model, 2), "the model's forward"),
    "the policy's forward": (lambda p: patch(p, 2), "the policy's forward"),
    "a hook on the policy": (a_forward_hook, None),
}
"""What a user may replace, and the part that the proof alone names; None where it sees nothing."""


def _no_attention(v, pattern):
    return torch.zeros(v.shape[0], pattern.shape[2], *v.shape[2:])


POST_NORM = {"original_architecture": "Olmo2ForCausalLM", "normalization_type": "RMS"}
MODELS = {
    "post-norm, OLMo 2": POST_NORM | {"gated_mlp": True, "act_fn": "silu"},
    "post-norm, OLMo 3": POST_NORM | {"original_architecture": "Olmo3ForCausalLM"},
    "normed queries and keys, OLMoE": LLAMA | {"original_architecture": "OlmoeForCausalLM"},
    "a soft cap on logits": {"output_logits_soft_cap": 3.0},
    "a soft cap on scores": {"attn_scores_soft_cap": 2.0},
    "parallel blocks": {"parallel_attn_mlp": True},
    "parallel blocks, final RMS": {"parallel_attn_mlp": True, "final_rms": True},
    "normed queries and keys, Qwen 3": LLAMA
    | {"original_architecture": "Qwen3ForCausalLM", "use_qk_norm": True},
    "a window that is not used": {"window_size": 3},
    "local attention": {
        "use_local_attn": True,
        "attn_types": ["local", "global"],
        "window_size": 2,
    },
}
"""Configurations that the packed form does not know."""


def expect(policy, reference, tokens, mask, temperature):
    """Log-probs, values, KL and entropy by plain calls of policy and reference."""
    with torch.no_grad():
        logits, values = policy(tokens, mask)
        ref_logits = TransformerWithValueHead(reference)(tokens, mask)[0]
    states = slice(PREFIX - 1, -1)
    every = log_probs(logits[:, states], temperature)
    return {
        "logprobs": get_logprobs(logits, tokens, PREFIX, temperature),
        "values": values[:, states],
        "kl": kl_per_token(every, log_probs(ref_logits[:, states], temperature)),
        "entropy": entropy_per_token(every),
    }


def check_every_door(policy, reference, forward, atol=2e-5):
    """Hold sampling, comparing and learning to plain calls of the policy."""
    generator = torch.Generator().manual_seed(3)
    prompts = [[4, 9], [7], [12, 5]]
    samples = sample(policy, prompts, SamplingSpec(4, temperature=1.3), generator, forward)
    expected = expect(policy, reference, samples.tokens, samples.attention_mask, 1.3)
    compared = compare_with_reference(policy, reference, samples, 1.3, 2, forward)
    out = run_policy(
        policy,
        samples.tokens,
        PREFIX,
        1.3,
        attention_mask=samples.attention_mask,
        reference=reference,
        ref_residuals=compared.ref_residuals,
        forward=forward,
    )
    found = {
        "logprobs": (samples.logprobs, out.logprobs),
        "values": (samples.values, out.values),
        "kl": (compared.kl, out.kl),
        "entropy": (compared.entropy, out.entropy),
    }
    for name, pair in found.items():
        for ours in pair:
            close = {"atol": atol, "rtol": atol, "msg": lambda m, n=name: f"{n}: {m}"}
            torch.testing.assert_close(ours.detach().float(), expected[name].float(), **close)
    ref_logprobs = reference_logprobs(reference, samples, compared.ref_residuals, 1.3, 2, forward)
    plain = TransformerWithValueHead(reference)(samples.tokens, samples.attention_mask)[0]
    plain = get_logprobs(plain, samples.tokens, PREFIX, 1.3).detach()
    torch.testing.assert_close(ref_logprobs.float(), plain.float(), atol=atol, rtol=atol)
    return samples


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the hooked modules run")
@pytest.mark.parametrize("mode", ["auto", "hooked"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_policy_gives_its_own_numbers_through_every_door(change, mode):
    policy = random_policy()
    reference = frozen_copy(policy.base_model)
    before = policy(TOKENS)[0]
    CHANGES[change][0](policy)
    assert (policy(TOKENS)[0].exp() - before.exp()).abs().max() > 1e-3 or change == (
        "the last block's forward"
    )
    check_every_door(policy, reference, Forward(mode))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the hooked modules run")
@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS.keys())
def test_a_model_of_another_kind_gives_its_own_numbers_through_every_door(settings):
    policy = random_policy(**settings)
    reference = frozen_copy(random_model(**settings | {"seed": 1}))
    with torch.no_grad():
        reference.unembed.W_U.mul_(0.7)
    check_every_door(policy, reference, Forward())


def test_a_final_norm_of_another_kind_than_the_blocks_runs_packed():
    for kind in ("LN", "LNPre"):
        policy = random_policy(normalization_type=kind, final_rms=True)
        forward = Forward("packed")
        assert forward.packs(policy)
        check_every_door(policy, frozen_copy(policy.base_model), forward)


@pytest.mark.parametrize("change", CHANGES)
def test_packed_refuses_a_changed_policy_in_one_sentence_before_anything_runs(change):
    policy = random_policy()
    CHANGES[change][0](policy)
    with pytest.raises(ConfigError, match=r"^forward='packed' cannot run .*; set it to 'auto'\.$"):
        sample(policy, [[4, 9]], SamplingSpec(2), forward=Forward("packed"))


@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS.keys())
def test_packed_refuses_a_model_of_another_kind_and_names_the_field(settings):
    field = next(f for f in reversed(settings) if f not in LLAMA and f != "final_rms")
    with pytest.raises(ConfigError, match=rf"does not know cfg\.({'|'.join(settings)})="):
        Forward("packed").packs(random_policy(**settings))
    assert field in settings


def test_auto_says_once_why_the_modules_run():
    policy, forward = random_policy(parallel_attn_mlp=True), Forward()
    with pytest.warns(UserWarning, match="packed form does not know cfg.parallel_attn_mlp=True"):
        assert not forward.packs(policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not forward.packs(policy)


def test_hooked_runs_nothing_but_the_modules(monkeypatch):
    def refuse(*inputs, **more):
        raise AssertionError("the packed form ran")

    for name in ("fast.blocks.run_block", "fast.readout.unembed", "outputs.unembed"):
        monkeypatch.setattr(f"rlhf_lab.models.{name}", refuse)
    policy = random_policy()
    reference = frozen_copy(policy.base_model)
    check_every_door(policy, reference, Forward("hooked"))
    with pytest.raises(AssertionError, match="packed form ran"):
        check_every_door(policy, reference, Forward())


def test_a_field_that_is_not_known_sends_the_model_to_the_modules():
    model = random_model()
    model.cfg.from_a_later_version = 1
    assert "cfg.from_a_later_version=1" in why_unknown(model)


def test_a_class_whose_method_was_replaced_sends_the_model_to_the_modules(monkeypatch):
    model = random_model()
    kind = type(model.blocks[0].mlp)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: 2 * forward(self, x))
    assert "MLP.forward was replaced" in why_unknown(model)


def test_equal_weights_give_a_kl_of_exactly_0_in_both_forms():
    policy = random_policy()
    reference = frozen_copy(policy.base_model)
    samples = sample(policy, [[4, 9], [7]], SamplingSpec(5))
    for mode in ("packed", "hooked"):
        kl = compare_with_reference(policy, reference, samples, 1.0, 2, Forward(mode)).kl
        assert torch.equal(kl, torch.zeros_like(kl)), mode


def test_a_copy_that_would_call_the_originals_parts_is_refused():
    model = random_model()
    patch(model.blocks[0].mlp, 0)
    with pytest.raises(
        ConfigError, match=r"^base_model\.blocks\.0\.mlp\.forward was replaced .* reference="
    ):
        frozen_copy(model)
    model.blocks[0].mlp.forward = lambda x: torch.zeros_like(x)
    assert frozen_copy(model).blocks[0].mlp(torch.ones(1, 1, 16)).abs().max() == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [TransformerWithValueHead, TransformerWithCritic])
@pytest.mark.filterwarnings("ignore:the hooked modules run")
def test_a_policy_in_half_precision_gives_the_right_numbers_through_every_door(dtype, kind):
    """Within what 8 bits of mantissa leave of them."""
    policy = kind(random_model(), make_value_head(16, seed=1))
    exact = copy.deepcopy(policy)(TOKENS)
    policy.to(dtype)
    reference = frozen_copy(policy.base_model)
    for ours, theirs in zip(policy(TOKENS), exact, strict=True):
        assert (ours.float() - theirs).abs().max() < 0.1 * theirs.abs().max().clamp(min=1)
    for mode in ("auto", "hooked"):
        check_every_door(policy, reference, Forward(mode), atol=0.15)
    listen = lambda x, hook: None
    with policy.base_model.hooks([("ln_final.hook_scale", listen)]):
        check_every_door(policy, reference, Forward(), atol=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["packed", "hooked"])
def test_a_llama_is_read_beyond_the_2048_positions_of_its_first_tables(mode):
    policy = random_policy(**LLAMA | {"n_ctx": 4096, "n_layers": 1})
    fresh = copy.deepcopy(policy)
    tokens = torch.randint(20, (1, 2060), generator=torch.Generator().manual_seed(0))
    expected = get_logprobs(fresh(tokens)[0], tokens, 2050)
    with torch.no_grad():
        found = run_policy(policy, tokens, 2050, forward=Forward(mode)).logprobs
    torch.testing.assert_close(found, expected.detach(), atol=1e-4, rtol=1e-4)
    again = random_policy(**LLAMA | {"n_ctx": 4096, "n_layers": 1})
    spec, generator = SamplingSpec(4), torch.Generator().manual_seed(0)
    samples = sample(again, [tokens[0, :2046].tolist()], spec, generator, Forward(mode))
    expected = get_logprobs(fresh(samples.tokens)[0], samples.tokens, 2046)
    torch.testing.assert_close(samples.logprobs, expected.detach(), atol=1e-4, rtol=1e-4)


def proof_of(policy, reference=None, forward=None):
    """What a run's proof says of a policy's samples."""
    forward = forward or Forward()
    reference = reference or frozen_copy(random_model())
    samples = sample(policy, [[4, 9], [7]], SamplingSpec(9, top_k=6), None, forward)
    return forward.prove(policy, reference, samples, 1.0), forward


@pytest.mark.parametrize("settings", [{}, LLAMA], ids=["gpt2", "llama"])
def test_the_proof_finds_no_more_than_rounding(settings):
    reference = frozen_copy(random_model(**settings))
    holds, forward = proof_of(random_policy(**settings), reference, Forward("packed"))
    assert holds and forward.fault is None
    assert 0 <= forward.gap < 1e-5


def trust(monkeypatch):
    """Switch the allow-list off."""
    for name in ("why_unknown", "why_not_passed", "why_not_read"):
        monkeypatch.setattr(f"rlhf_lab.models.forward.{name}", lambda model: None)
    monkeypatch.setattr("rlhf_lab.models.forward.transformer_of", lambda policy: policy.base_model)


@pytest.mark.slow
@pytest.mark.parametrize("change", [c for c, (_, part) in CHANGES.items() if part is not None])
def test_the_proof_alone_finds_a_change_and_names_the_first_part_that_differs(change, monkeypatch):
    trust(monkeypatch)
    policy = random_policy()
    make, part = CHANGES[change]
    make(policy)
    with pytest.warns(UserWarning, match=rf"modules run from now on: .* first in {part}\.$"):
        holds, forward = proof_of(policy)
    assert not holds and forward.gap > 1e-3
    assert forward.why_hooked(policy) == forward.fault
    with pytest.raises(RunError, match=rf"^forward='packed' is not right here.*{part}"):
        proof_of(policy, forward=Forward("packed"))


@pytest.mark.slow
@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS.keys())
def test_the_proof_alone_finds_what_the_packed_form_does_not_know(settings, monkeypatch):
    """All but settings that change nothing."""
    if "parallel_attn_mlp" in settings:
        pytest.skip("the packed form cannot run it at all")
    trust(monkeypatch)
    policy = random_policy(**settings)
    harmless = set(settings) <= {"window_size", *LLAMA} or "Qwen2ForCausalLM" in settings.values()
    if harmless:
        assert proof_of(policy, frozen_copy(policy.base_model))[0]
    else:
        with pytest.warns(UserWarning, match="first in"):
            assert not proof_of(policy, frozen_copy(policy.base_model))[0]


def test_a_wrong_decoder_is_found_by_what_the_sampler_noted(monkeypatch):
    decode = "rlhf_lab.models.fast.decoder.PackedDecoder._attend"
    zeros = lambda self, attend, cache, qkv: torch.zeros_like(qkv[0])
    monkeypatch.setattr(decode, zeros)
    with pytest.warns(UserWarning, match="first in decoding"):
        assert not proof_of(random_policy())[0]


def test_a_wrong_decoder_by_modules_is_found_at_the_start(monkeypatch):
    policy, forward = random_policy(), Forward()
    samples = sample(policy, [[4, 9], [7]], SamplingSpec(5), None, forward)
    reference = frozen_copy(policy.base_model)
    assert Forward().prove(policy, reference, samples, 1.0)
    decode = "rlhf_lab.models.decode.HookedDecoder._run"
    run = __import__("rlhf_lab.models.decode", fromlist=["x"]).HookedDecoder._run
    wrong = lambda *inputs: run(*inputs)._replace(logits=torch.zeros(2, 20))
    monkeypatch.setattr(decode, wrong)
    with pytest.warns(UserWarning, match="first in decoding"):
        assert not forward.prove(policy, reference, samples, 1.0)


def test_a_wrong_gradient_is_found_at_the_start_only(monkeypatch):
    halve = lambda packed, x, at: _half_gradient(mlp(packed, x, at))
    blocks = __import__("rlhf_lab.models.fast.blocks", fromlist=["x"])
    mlp = blocks._mlp
    policy, forward, late = random_policy(), Forward(), Forward(proved=True)
    monkeypatch.setattr(blocks, "_mlp", halve)
    assert proof_of(policy, forward=late)[0]
    with pytest.warns(UserWarning, match="first in the gradient"):
        assert not proof_of(policy, forward=forward)[0]


def _half_gradient(x):
    return x / 2 + x.detach() / 2


def test_a_wrong_reference_is_found_at_the_start(monkeypatch):
    trust(monkeypatch)
    reference = frozen_copy(random_model())
    subclass(reference.unembed)
    with pytest.warns(UserWarning, match="first in the reference"):
        assert not proof_of(random_policy(), reference)[0]


def test_a_proof_disturbs_nothing():
    """No hook of the user's fires for it, no gradient is left, nothing random is drawn."""
    policy = random_policy()
    reference = frozen_copy(policy.base_model)
    fired = []
    policy.base_model.add_hook("blocks.0.hook_resid_post", lambda x, hook: fired.append(1))
    samples = sample(policy, [[4, 9], [7, 5]], SamplingSpec(5))
    n, forward, random_state = len(fired), Forward(), torch.get_rng_state()
    assert n and forward.prove(policy, reference, samples, 1.0) and forward.gap < 1e-5
    assert len(fired) == n
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in policy.parameters())
    policy(TOKENS)
    assert len(fired) == n + 1
    policy.base_model.reset_hooks()
    policy(TOKENS)
    assert len(fired) == n + 1


def test_a_hook_that_intervenes_is_no_fault_of_the_packed_form():
    policy = random_policy()
    policy.base_model.add_hook("blocks.0.hook_resid_post", lambda x, hook: x / 2)
    holds, forward = proof_of(policy)
    assert holds and forward.gap < 1e-5


def test_there_is_no_gap_where_the_modules_run():
    for forward in (Forward("hooked"), Forward()):
        policy = random_policy()
        if forward.mode == "auto":
            policy.base_model.add_hook("blocks.0.attn.hook_pattern", lambda x, hook: None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            holds, forward = proof_of(policy, forward=forward)
        assert holds and forward.gap is None


def test_a_critic_of_its_own_is_proved_up_to_its_values():
    policy = TransformerWithCritic(random_model(), seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        holds, forward = proof_of(policy)
    assert holds and forward.gap < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reel-nano"])
def test_the_gaps_of_a_bundled_model_in_both_precisions(name):
    """bfloat16 products leave 8 bits of mantissa; what they cost is seen in decoding alone."""
    policy = TransformerWithValueHead(load_model(name))
    reference = frozen_copy(policy.base_model)
    for dtype, most in ((None, 1e-5), (torch.bfloat16, 0.25)):
        forward = Forward("packed", dtype)
        samples = sample(policy, [[0, 2, 8]] * 4, SamplingSpec(20), None, forward)
        assert forward.prove(policy, reference, samples, 1.0)
        assert 0 < forward.gap < most


def test_a_policy_whose_values_are_not_a_number_is_not_the_packed_forms_fault():
    policy = random_policy()
    with torch.no_grad():
        policy.value_head[2].bias.fill_(torch.nan)
    assert proof_of(policy)[0]


def test_a_value_head_of_the_callers_own_runs_packed_and_is_proved():
    policy = TransformerWithValueHead(random_model(), nn.Linear(16, 1))
    holds, forward = proof_of(policy, forward=Forward("packed"))
    assert holds and forward.gap < 1e-5
