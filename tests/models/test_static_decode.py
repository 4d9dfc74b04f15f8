"""Tests the static decode step against the growing cache, eagerly and as a replayed tape."""

import copy
from unittest.mock import Mock

import pytest
import torch

from rlhf_lab import sampling
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import (
    Forward,
    TransformerWithCritic,
    decode,
    final_residuals,
    forward,
    frozen_copy,
    hooked_transformer,
    run_policy,
)
from rlhf_lab.models import TransformerWithValueHead as Policy
from rlhf_lab.models.decode import Decoder, StaticStep, can_capture
from rlhf_lab.sampling import SamplingSpec, sample
from tests.models.test_paths import MODELS, TOKENS, random_model
from tests.tape import capture_on_tape

PROMPTS, GEN_LEN, EAGER = TOKENS[:, :4], 10, Forward(graphs=False)
DRAWN = torch.randint(20, (3, GEN_LEN), generator=torch.Generator().manual_seed(0))
EQUAL, UNEQUAL = torch.ones(2, 3, 4, dtype=torch.bool)
UNEQUAL[1, :1] = UNEQUAL[2, :2] = False
MASKS = pytest.mark.parametrize("mask", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
STATIC = {name: settings for name, settings in MODELS.items() if name != "window"}


def static_decoder(policy, prompts, mask):
    decoder = Decoder(policy, prompts, mask, GEN_LEN)
    decoder.step = StaticStep(policy, decoder.cache, decoder.prompt_mask, GEN_LEN)
    return decoder


def decoded_states(decoder, tokens):
    states = [decoder.state]
    for token in tokens.T:
        decoder.feed(token)
        states.append(decoder.state._replace(logits=decoder.state.logits.clone()))
    return states


@MASKS
@pytest.mark.slow
@pytest.mark.parametrize("settings", STATIC.values(), ids=STATIC.keys())
def test_static_step_matches_growing_cache(settings, mask, monkeypatch):
    monkeypatch.setattr(decode, "capture", capture_on_tape)
    policy = Policy(random_model(**settings))
    with torch.no_grad():
        static = static_decoder(policy, PROMPTS, mask)
        static.step.captured()
        states = decoded_states(static, DRAWN)
        expected = decoded_states(Decoder(policy, PROMPTS, mask, GEN_LEN), DRAWN)
    for state, other in zip(states, expected, strict=True):  # later steps overwrite none
        torch.testing.assert_close(tuple(state), tuple(other), atol=1e-5, rtol=1e-5)


def test_static_cache_has_the_dtypes_of_keys_and_of_values(monkeypatch):
    """On CUDA, autocast normalizes the keys of Qwen 3 in float32; the values are in bfloat16."""
    normalize = torch.nn.functional.rms_norm
    monkeypatch.setattr(hooked_transformer.F, "rms_norm", lambda x, *o: normalize(x.float(), *o))
    policy, mixed = Policy(random_model(**MODELS["Qwen 3"])), Forward(torch.bfloat16)
    with torch.no_grad():
        static, growing = (Decoder(policy, PROMPTS, EQUAL, GEN_LEN, mixed) for _ in range(2))
        static.step = static.static_step()
        states, expected = decoded_states(static, DRAWN), decoded_states(growing, DRAWN)
    assert growing.cache.entries[0].past_keys.dtype == torch.float32
    assert growing.cache.entries[0].past_values.dtype == torch.bfloat16
    for state, other in zip(states, expected, strict=True):
        torch.testing.assert_close(tuple(state), tuple(other), atol=0.1, rtol=0.1)


SPECS = {
    "all tokens": SamplingSpec(GEN_LEN),
    "top-k": SamplingSpec(GEN_LEN, top_k=5),
    "top-p": SamplingSpec(GEN_LEN, top_p=0.7, temperature=0.8),
    "stops": SamplingSpec(GEN_LEN, stop_tokens=(10, 11, 12)),
}


@pytest.fixture
def captured(monkeypatch):
    """Inputs of all captures, which are on tapes; `EAGER` has none."""
    inputs = []
    monkeypatch.setattr(decode, "capture", lambda *x: inputs.append(x) or capture_on_tape(*x))
    monkeypatch.setattr(decode, "can_capture", lambda *x: True)
    return inputs


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_sampling_from_kept_graphs_matches_growing_cache(spec, captured, monkeypatch):
    """Several batches; the second has other weights, prompts and noise, the third another size."""
    monkeypatch.setattr(decode, "SPAN", 8)
    monkeypatch.setattr(decode, "TOKENS_UNREAD", 1)
    policy, forward = Policy(random_model()), Forward()
    batches = [[[4, 9, 13], [7], [12, 4, 19, 6], [7]], [[5], [6, 9, 13, 2], [12], [3]]]
    batches.append(batches[1][:2])
    for number, prompts in enumerate(batches):
        expected, found = (
            sample(policy, prompts, spec, torch.Generator().manual_seed(number), settings)
            for settings in (EAGER, forward)
        )
        assert len(captured) == [2, 2, 4][number]  # for spans of 8 and 16 tokens
        assert torch.equal(found.tokens, expected.tokens)
        numbers = [[x.logprobs, x.values, x.residuals] for x in (found, expected)]
        torch.testing.assert_close(*numbers, atol=1e-5, rtol=0)
        if spec.truncates:
            kept = expected.support.kept
            assert torch.equal(found.support.kept, kept)
            assert torch.equal(found.support.tokens[kept], expected.support.tokens[kept])
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.1)


HOOKED = (
    "hook_embed blocks.0.attn.hook_q blocks.0.attn.hook_result blocks.0.ln2.hook_scale "
    "blocks.1.hook_resid_post ln_final.hook_normalized unembed.hook_in value_head.hook_hidden"
)


@pytest.mark.slow
def test_hooks_run_between_the_pieces_of_a_step(captured):
    """All activations are read; two are changed, one of them by a hook that removes itself."""
    spec = SamplingSpec(GEN_LEN, top_k=5, stop_tokens=(6,))  # for 8 of 10 tokens
    results = []
    for settings in (EAGER, Forward()):
        policy, seen = Policy(random_model()), []
        for name in HOOKED.split():
            policy.add_hook(name, lambda x, hook, seen=seen: seen.append((hook.name, x.clone())))

        def scale_for_six_tokens(x, hook, seen=seen):
            if len(seen) > 6 * len(HOOKED.split()):
                hook.remove_hooks()
            return 3 * x

        policy.add_hook("blocks.0.hook_mlp_out", scale_for_six_tokens)
        policy.add_hook("blocks.1.attn.hook_v", lambda x, hook: x.mul_(-2))
        generator = torch.Generator().manual_seed(3)
        samples = sample(policy, [[4, 9], [7]], spec, generator, settings)
        names, activations = zip(*seen, strict=True)
        results.append((names, samples.tokens, samples.logprobs, samples.values, *activations))
    (names, *expected), (found_names, *found) = results
    assert found_names == names and len(captured) == 2  # with the hook that removes itself, without
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    policy.add_hook("hook_embed", lambda x, hook: x if x.shape[1] > 1 else x.double())
    with pytest.raises(ConfigError, match="hook_embed.*float64.*set cuda_graphs=False"):
        sample(policy, [[4, 9], [7]], SPECS["top-k"])


@pytest.mark.parametrize("is_hooked", [False, True])
def test_wide_nucleus_is_captured_without_hooks(captured, monkeypatch, is_hooked):
    monkeypatch.setattr(sampling, "WIDEST_KEPT", 4)
    once, results = lambda x, hook: hook.remove_hooks() if x.shape[1] == 1 else x, []
    for settings in (EAGER, Forward()):
        policy = Policy(random_model())
        if is_hooked:
            policy.add_hook("hook_embed", once)
        generator = torch.Generator().manual_seed(1)
        found = sample(policy, [[4, 9], [7]], SPECS["top-p"], generator, settings)
        results.append([found.tokens, found.logprobs, found.values])
    assert len(captured) == (not is_hooked)
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "width"), [("top-k", 1024), ("top-p", 1024), ("top-p", 4)])
def test_failed_capture_warns_once_and_samples_eagerly(captured, monkeypatch, name, width):
    monkeypatch.setattr(sampling, "WIDEST_KEPT", width)
    inputs, forward = (Policy(random_model()), [[4, 9], [7]], SPECS[name]), Forward()
    failing = Mock(side_effect=RuntimeError("no memory"))
    monkeypatch.setattr(decode, "capture", failing)
    expected = sample(*inputs, torch.Generator().manual_seed(1), EAGER)
    with pytest.warns(UserWarning, match="cuda_graphs is switched off in sampling: no memory"):
        found = sample(*inputs, torch.Generator().manual_seed(1), forward)
    again = sample(*inputs, torch.Generator().manual_seed(1), forward)
    assert torch.equal(found.tokens, expected.tokens) and torch.equal(again.tokens, found.tokens)
    assert not forward.graphs and failing.call_count == 1


def test_kept_graphs_stop_within_16_tokens_of_the_last_stop(captured):
    policy, spec = Policy(random_model(n_ctx=64)), SamplingSpec(40, stop_tokens=(3, 4, 5, 6))
    expected, found = (
        sample(policy, [[7], [8]], spec, torch.Generator().manual_seed(1), settings)
        for settings in (EAGER, Forward())
    )
    assert captured and not expected.mask[:, 16:].any() and torch.equal(found.mask, expected.mask)
    assert torch.equal(found.tokens, expected.tokens) and not found.values[:, 16:].any()


@pytest.mark.slow
def test_changed_policy_or_setting_is_captured_again(captured):
    policy, forward = Policy(random_model()), Forward()
    model = policy.base_model
    changes = (
        lambda: None,
        lambda: setattr(model.blocks[0].mlp, "act_fn", torch.tanh),
        lambda: setattr(model.blocks[1].mlp, "forward", lambda x: 0 * x),
        lambda: setattr(forward, "tf32", True),
        lambda: setattr(model, "blocks", copy.deepcopy(model.blocks)),
    )
    for number, change in enumerate(changes):
        change()
        expected, *results = (
            sample(policy, [[4, 9], [7]], SPECS["top-k"], torch.Generator().manual_seed(1), x)
            for x in (EAGER, forward, forward)
        )
        assert len(captured) == number + 1
        for found in results:
            assert torch.equal(found.tokens, expected.tokens)
            torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("settings", STATIC.values(), ids=STATIC.keys())
def test_weights_cast_together_match_autocast(settings, monkeypatch):
    policy = Policy(random_model(**settings))
    reference = frozen_copy(random_model(eps=0.1, **settings))
    ref_residuals = final_residuals(reference, TOKENS, dtype=torch.bfloat16)[:, 1:-1]
    results = []
    for is_cast in (False, True):
        monkeypatch.setattr(forward, "casts_at_once", lambda *inputs, on=is_cast: on)
        options = {"reference": reference, "ref_residuals": ref_residuals}
        outputs = run_policy(policy, TOKENS, 2, forward=Forward(torch.bfloat16), **options)
        loss = (outputs.logprobs + outputs.values + outputs.entropy - outputs.kl).sum()
        results.append([loss, *torch.autograd.grad(loss, list(policy.parameters()))])
    assert all(map(torch.equal, *results))
    assert policy.base_model.blocks[0].attn.W_O.dtype == torch.float32


def test_policies_on_cuda_are_captured_unless_other_code_runs(monkeypatch):
    policy = Policy(random_model().cpu())
    assert not can_capture(policy, 8)
    device = property(lambda self: torch.device("cuda"))
    monkeypatch.setattr(Policy, "device", device)
    assert can_capture(policy, 8) and not can_capture(policy, 7)
    for name in ("value_head.hook_in", "blocks.0.attn.hook_pattern", "unembed.hook_out"):
        with policy.hooks([(name, lambda x, hook: None)]):
            assert can_capture(policy, 8) == (name == "value_head.hook_in")
    with policy.base_model.blocks[0].mlp.register_forward_hook(lambda *inputs: None):
        assert not can_capture(policy, 8)
    assert not can_capture(Policy(random_model(attn_types=["local", "global"], window_size=2)), 8)
    assert not can_capture(TransformerWithCritic(random_model()), 8)


@MASKS
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graph_matches_growing_cache(mask):
    policy = Policy(random_model()).cuda()
    texts = PROMPTS.cuda(), mask.cuda()
    with torch.no_grad():
        captured, growing = (Decoder(policy, *texts, GEN_LEN) for _ in range(2))
        captured.step = captured.static_step().captured()
        states, expected = (decoded_states(x, DRAWN.cuda()) for x in (captured, growing))
    assert captured.is_static and captured.step.step != captured.step.advance
    for state, other in zip(states, expected, strict=True):
        torch.testing.assert_close(state.logits, other.logits, atol=1e-4, rtol=1e-4)
