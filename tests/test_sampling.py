"""Tests the sampler against full forward passes without cache or padding, fed the same noise."""

import copy
import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import generated_logits, get_logprobs, log_probs, masked_mean
from rlhf_lab.models import HookedTransformer, TransformerWithValueHead, load_model
from rlhf_lab.models.decode import State
from rlhf_lab.sampling import (
    Samples,
    SamplingSpec,
    Support,
    _Step,
    draw_token,
    join_samples,
    pad_prompts,
    sample,
    sample_in_parts,
    sample_without_cache,
    sampling_noise,
    tokenize_prompts,
)
from rlhf_lab.sampling_spec import top_k_filter

VALUE_HOOK = "ln_final.hook_normalized"
INF = math.inf
EQUAL = [[4, 9, 13]] * 4
UNEQUAL = [[4, 9, 13], [7], [12, 4, 19, 6, 8], [7, 5]]
REPEATED = [[4, 9], [7, 5, 8], [4, 9], [7, 5, 8], [4, 9], [6]]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def allowed_tokens(logits, top_k, top_p):
    """Token ids that survive top-k and then top-p, found by walking down a sorted list."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    order = order[: top_k or len(order)]
    weights = [math.exp(logits[token] - logits[order[0]]) for token in order]
    kept, reached = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if top_p is not None and reached >= top_p:
            break
        kept.append(token)
        reached += weight / sum(weights)
    return kept


@torch.no_grad()
def sample_uncached(policy, prompts, spec, generator):
    """One full forward pass per step and row, on the real tokens only."""
    model, stops = policy.base_model, spec.stops(policy.base_model.tokenizer)
    rows = [list(prompt) for prompt in prompts]
    tokens, mask, logprobs, values = ([[] for _ in rows] for _ in range(4))
    for noise in torch.rand(spec.gen_len, len(rows), generator=generator).tolist():
        for i, row in enumerate(rows):
            tokens_so_far = torch.tensor([row])
            logits, cache = model.run_with_cache(
                tokens_so_far,
                attention_mask=torch.ones_like(tokens_so_far),
                names_filter=VALUE_HOOK,
            )
            scaled = logits[0, -1] / spec.temperature
            kept = allowed_tokens(scaled.tolist(), spec.top_k, spec.top_p)
            kept = kept if spec.truncates else sorted(kept)
            probs = scaled[kept].softmax(-1).tolist()
            place = next(j for j in range(len(kept)) if sum(probs[: j + 1]) > noise[i])
            values[i].append(policy.value_head(cache[VALUE_HOOK])[0, -1, 0].item())
            mask[i].append(not any(t in stops for t in tokens[i]))
            tokens[i].append(kept[place])
            logprobs[i].append(math.log(probs[place]))
            row.append(kept[place])
    return tokens, mask, logprobs, values


def assert_agrees(policy, prompts, spec):
    found = sample(policy, prompts, spec, seeded())
    tokens, mask, logprobs, values = sample_uncached(policy, prompts, spec, seeded())
    assert found.mask.tolist() == mask
    real = torch.tensor(mask)
    generated = found.tokens[:, found.prefix_len :]
    assert generated[real].tolist() == torch.tensor(tokens)[real].tolist()
    for name, expected in (("logprobs", logprobs), ("values", values)):
        torch.testing.assert_close(
            getattr(found, name)[real], torch.tensor(expected)[real], atol=1e-5, rtol=0
        )
    assert len({tuple(row) for row in tokens}) > 1, "rows that are all alike prove little"
    return found


@pytest.fixture
def gpt2(gpt2_dir, make_policy):
    return make_policy(gpt2_dir)


@pytest.fixture
def without_tokenizer(gpt2):
    model = HookedTransformer(gpt2.base_model.cfg)
    model.load_state_dict(gpt2.base_model.state_dict())
    assert model.tokenizer is None
    return TransformerWithValueHead(model, gpt2.value_head)


@pytest.fixture
def always_says(gpt2):
    """Makes the policy say one token for sure, whatever came before."""

    def build(token):
        with torch.no_grad():
            gpt2.base_model.unembed.W_U.zero_()
            gpt2.base_model.unembed.b_U.fill_(-1000.0)
            gpt2.base_model.unembed.b_U[token] = 0.0
        return gpt2

    return build


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_p": 0.7},
        {"temperature": 1.5, "top_k": 12, "top_p": 0.8},
        {"stop_at_eos": True, "stop_tokens": (5, 9, 14)},
    ],
    ids=str,
)
@pytest.mark.parametrize("prompts", [EQUAL, UNEQUAL, REPEATED], ids=["equal", "unequal", "repeat"])
def test_sampling_with_a_cache_equals_sampling_without(policy, prompts, settings):
    assert_agrees(policy, prompts, SamplingSpec(8, **settings))


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [EQUAL, UNEQUAL, REPEATED], ids=["equal", "unequal", "repeat"])
def test_a_model_without_a_tokenizer_samples_the_same(without_tokenizer, prompts):
    """The new tokens have to stand at positions n, n + 1, ..., as in an uncached pass."""
    assert_agrees(without_tokenizer, prompts, SamplingSpec(8, stop_tokens=(5,)))


@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_that_hold_the_padding_token_are_read_whole(gpt2, side):
    """Token 0 is BOS, EOS and padding of this tokenizer."""
    gpt2.base_model.tokenizer.padding_side = side
    assert_agrees(gpt2, [[0, 4, 0, 9], [0, 7], [0], [0, 0]], SamplingSpec(8))


def test_a_prompt_that_begins_with_padding_tokens_is_not_merged_with_a_padded_one(gpt2):
    """[0, 7] and [7] look alike once [7] is padded with 0 on the left."""
    found = assert_agrees(gpt2, [[0, 7], [7]], SamplingSpec(8))
    assert found.tokens[0, :2].tolist() == found.tokens[1, :2].tolist()
    assert (found.values[0, 0] - found.values[1, 0]).abs() > 1e-3


def test_the_sampler_fills_the_context_to_the_last_position(gpt2):
    assert_agrees(gpt2, [[4, 9], [7, 5, 8, 6]], SamplingSpec(20))


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [[[4, 9, 13]], [[7]]])
def test_a_batch_of_one(policy, prompts):
    found = sample(policy, prompts, SamplingSpec(6), seeded())
    tokens, _, logprobs, _ = sample_uncached(policy, prompts, SamplingSpec(6), seeded())
    assert found.tokens[:, len(prompts[0]) :].tolist() == tokens
    torch.testing.assert_close(found.logprobs, torch.tensor(logprobs), atol=1e-5, rtol=0)


def test_a_single_token_per_sequence(policy):
    found = assert_agrees(policy, UNEQUAL, SamplingSpec(1))
    assert found.tokens.shape == (4, 6)
    assert found.mask.shape == found.logprobs.shape == found.values.shape == (4, 1)


def test_prompts_are_returned_padded_on_the_left(gpt2):
    found = sample(gpt2, [[4, 9, 13], [7]], SamplingSpec(2), seeded())
    assert found.tokens[:, :3].tolist() == [[4, 9, 13], [0, 0, 7]]
    assert found.prompt_mask.tolist() == [[True, True, True], [False, False, True]]
    assert found.prefix_len == 3
    assert found.attention_mask.tolist() == [[True] * 5, [False, False, True, True, True]]


def test_the_prompt_is_run_once_per_distinct_prompt(policy):
    """Three distinct prompts among six rows, then one token for each of the six rows."""
    shapes = []
    policy.base_model.add_hook("hook_embed", lambda x, hook: shapes.append(tuple(x.shape[:2])))
    sample(policy, REPEATED, SamplingSpec(4), seeded())
    assert shapes == [(3, 3), (6, 1), (6, 1), (6, 1)]


def test_one_prompt_for_all_rows_is_run_once(policy):
    shapes = []
    policy.base_model.add_hook("hook_embed", lambda x, hook: shapes.append(tuple(x.shape[:2])))
    sample(policy, EQUAL, SamplingSpec(1), seeded())
    assert shapes == [(1, 3)]


def test_hooks_of_the_user_change_what_is_sampled_and_stay(gpt2):
    """The hook pushes the residual so that the unembedding says token 11 with all but certainty."""
    push = 1000 * gpt2.base_model.W_U[:, 11].detach()
    with torch.no_grad():
        gpt2.base_model.ln_final.w.fill_(1)
        gpt2.base_model.ln_final.b.zero_()
    gpt2.base_model.add_hook("ln_final.hook_normalized", lambda x, hook: x + push)
    found = sample(gpt2, UNEQUAL, SamplingSpec(4), seeded())
    assert (found.tokens[:, -4:] == 11).all()
    assert len(gpt2.base_model.hook_dict[VALUE_HOOK].fwd_hooks) == 1


def test_the_same_generator_state_gives_the_same_samples(policy):
    one, two = (sample(policy, UNEQUAL, SamplingSpec(8), seeded(7)) for _ in range(2))
    other = sample(policy, UNEQUAL, SamplingSpec(8), seeded(8))
    assert torch.equal(one.tokens, two.tokens) and torch.equal(one.logprobs, two.logprobs)
    assert not torch.equal(one.tokens, other.tokens)


def test_a_generator_makes_sampling_independent_of_the_global_random_state(policy):
    torch.manual_seed(1)
    one = sample(policy, UNEQUAL, SamplingSpec(8), seeded(7))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    two = sample(policy, UNEQUAL, SamplingSpec(8), seeded(7))
    assert torch.equal(one.tokens, two.tokens)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_generator_the_global_one_decides(policy):
    torch.manual_seed(1)
    one = sample(policy, UNEQUAL, SamplingSpec(8))
    assert not torch.equal(sample(policy, UNEQUAL, SamplingSpec(8)).tokens, one.tokens)
    torch.manual_seed(1)
    assert torch.equal(sample(policy, UNEQUAL, SamplingSpec(8)).tokens, one.tokens)


def test_tokens_are_drawn_as_often_as_the_model_says(gpt2):
    """Counts of n draws lie within 5 standard errors, sqrt(n p (1 - p)), of n p."""
    n = 4000
    found = sample(gpt2, [[4, 9, 13]] * n, SamplingSpec(1, temperature=1.5), seeded())
    counts = torch.bincount(found.tokens[:, -1], minlength=21).double()
    probs = (gpt2(torch.tensor([[4, 9, 13]]))[0][0, -1].double() / 1.5).softmax(-1).detach()
    assert (probs > 0.01).sum() > 3
    assert ((counts - n * probs).abs() <= 5 * (n * probs * (1 - probs)).sqrt() + 1).all()


def test_sampling_without_a_cache_gives_the_tokens_of_the_sampler(gpt2):
    """Three prompts of one length: the same noise, the same tokens."""
    model, prompts = gpt2.base_model, [[4, 9, 13], [7, 5, 8], [4, 9, 12]]
    found = sample(gpt2, prompts, SamplingSpec(6, temperature=1.5), seeded())
    noise = sampling_noise(3, 6, seeded())
    tokens = sample_without_cache(model, torch.tensor(prompts), noise, 1.5)
    assert len(set(tokens[:, 3:].flatten().tolist())) > 3
    assert torch.equal(tokens, found.tokens)
    assert not torch.equal(tokens, sample_without_cache(model, torch.tensor(prompts), noise, 0.2))


def test_sampling_without_a_cache_refuses_more_than_the_context(gpt2):
    model = gpt2.base_model
    noise = sampling_noise(1, model.cfg.n_ctx - 1, seeded())
    with pytest.raises(ConfigError, match="exceeds the model's context"):
        sample_without_cache(model, torch.tensor([[4, 9]]), noise)


def test_draws_by_hand():
    """Probabilities .1 .4 0 .3 .2 reach .1, .5, .5, .8 and 1."""
    logprobs = torch.tensor([0.1, 0.4, 0.0, 0.3, 0.2]).log().expand(7, 5)
    noise = torch.tensor([0.0, 0.0999, 0.1001, 0.4999, 0.5001, 0.7999, 0.8001])
    assert draw_token(logprobs, noise).tolist() == [0, 0, 1, 1, 3, 3, 4]


def test_noise_at_the_edge_of_a_probability_goes_to_the_next_token():
    """1/4, 1/4, 0, 1/2 are exact in binary: a share [0, 1/4), a share [1/4, 1/2), one [1/2, 1)."""
    logprobs = torch.tensor([0.25, 0.25, 0.0, 0.5]).log2().mul(math.log(2)).expand(3, 4).double()
    exact = torch.tensor([0.0, 0.25, 0.5], dtype=torch.float64)
    assert draw_token(logprobs, exact).tolist() == [0, 1, 3]


def test_noise_is_the_share_of_the_whole_sum_that_rounding_left():
    """Half the probabilities, as a sum of many rounded ones may fall short: the same tokens."""
    probs = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).expand(50, 4)
    noise = torch.linspace(0.005, 0.995, 50)
    assert torch.equal(draw_token(probs.log(), noise), draw_token((probs / 2).log(), noise))


@pytest.mark.parametrize("d_vocab", [1, 2, 72, 50_257])
@pytest.mark.parametrize("end", ["first", "last"])
def test_a_token_of_probability_0_is_never_drawn(d_vocab, end):
    """The least and the greatest noise there is, where the first or the last tokens are excluded.

    The sums that the product with the greatest noise could round up to differ from row to row.
    """
    logits = torch.randn(200, d_vocab, generator=seeded())
    excluded = slice(0, d_vocab // 2) if end == "first" else slice(d_vocab - d_vocab // 2, d_vocab)
    logits[:, excluded] = -INF
    for noise in (0.0, 1 - 2**-24):
        drawn = draw_token(logits.log_softmax(-1), torch.full((200,), noise))
        assert logits.gather(-1, drawn[:, None]).isfinite().all()


def test_the_greatest_noise_stays_below_every_sum_when_multiplied():
    """The float32 below 1 is 1 - 2**-24; one part in 2**24 is never rounded away."""
    sums = torch.rand(1_000_000, generator=seeded()) * 2 + 2**-20
    assert ((1 - 2**-24) * sums < sums).all()
    noise = sampling_noise(3, 100_000, seeded())
    assert noise.shape == (100_000, 3) and 0 <= noise.min() and noise.max() <= 1 - 2**-24


def test_a_row_has_the_same_noise_however_the_batch_is_cut(policy):
    spec, prompts = SamplingSpec(8, temperature=1.5), UNEQUAL * 2
    whole = sample(policy, prompts, spec, seeded(3))
    for part_size in (1, 2, 3, 5, 7, 8, 9):
        cut = sample_in_parts(policy, prompts, spec, seeded(3), part_size=part_size)
        assert torch.equal(cut.tokens, whole.tokens)
        torch.testing.assert_close(cut.logprobs, whole.logprobs, atol=1e-5, rtol=0)


def test_the_generator_advances_by_the_size_alone(gpt2):
    """Truncation, stop tokens and early ends draw no more and no less."""
    states = []
    for settings in ({}, {"top_k": 2}, {"stop_tokens": (0, 1, 2, 3)}, {"temperature": 9.0}):
        generator = seeded(4)
        sample(gpt2, UNEQUAL, SamplingSpec(6, **settings), generator)
        states.append(generator.get_state())
    assert all(torch.equal(state, states[0]) for state in states)


def test_the_nucleus_is_cut_to_its_width_where_the_vocabulary_is_wide():
    """At 50,257 tokens, a step would otherwise keep 9 bytes of each until all are written."""
    logits = torch.randn(3, 50_257, generator=seeded())
    logits[:, :5] += 20
    state = State(logits, torch.zeros(3), None)
    step = _Step.take(state, SamplingSpec(1, top_p=0.9), torch.rand(3, generator=seeded()))
    assert step.candidates.shape == step.kept.shape
    assert step.kept.shape[1] == step.kept.sum(-1).max() <= 5


def test_a_float64_policy_is_noted_in_float64(gpt2):
    found = sample(gpt2.double(), UNEQUAL, SamplingSpec(4, top_k=9), seeded())
    logits, values = gpt2(found.tokens, attention_mask=found.attention_mask)
    restricted = found.support.restrict(logits, found.prefix_len)
    logprobs = get_logprobs(restricted, found.tokens, found.prefix_len)
    torch.testing.assert_close(found.logprobs, logprobs, atol=1e-12, rtol=0)
    torch.testing.assert_close(found.values, values[:, 4:-1], atol=1e-12, rtol=0)


def test_samples_carry_no_gradient_and_can_be_trained_on(policy):
    """`HookedTransformer.generate` returns inference tensors, which backward refuses."""
    found = sample(policy, UNEQUAL, SamplingSpec(4), seeded())
    for tensor in (found.tokens, found.logprobs, found.values, found.mask, found.prompt_mask):
        assert not tensor.requires_grad and not tensor.is_inference()
    logits, values = policy(found.tokens, attention_mask=found.attention_mask)
    logprobs = get_logprobs(logits, found.tokens, found.prefix_len)
    ratio = (logprobs - found.logprobs).exp()
    (ratio * found.values).sum().add(values.sum()).backward()
    assert policy.base_model.embed.W_E.grad.abs().max() > 0
    for parameter in policy.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()


def test_sampling_turns_gradients_back_on_and_leaves_the_weights(policy):
    learns = {name: parameter.requires_grad for name, parameter in policy.named_parameters()}
    before = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    sample(policy, UNEQUAL, SamplingSpec(4), seeded())
    assert torch.is_grad_enabled()
    assert policy(torch.tensor([[4, 9]]))[0].requires_grad
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.requires_grad == learns[name]


def test_each_row_ends_with_its_first_stop_token(policy):
    """The noise of a row does not depend on when rows stop, so a run without stops foretells it."""
    pad_token = policy.base_model.tokenizer.pad_token_id
    free = sample(policy, UNEQUAL * 4, SamplingSpec(10), seeded()).tokens[:, 5:]
    stops = (int(free[0, 4]), int(free[1, 2]), int(free[2, 6]))
    found = sample(policy, UNEQUAL * 4, SamplingSpec(10, stop_tokens=stops), seeded())
    lengths = set()
    for row, (tokens, mask) in enumerate(zip(found.tokens[:, 5:], found.mask, strict=True)):
        length = next((t + 1 for t in range(10) if int(free[row, t]) in stops), 10)
        lengths.add(length)
        assert mask.tolist() == [True] * length + [False] * (10 - length)
        assert tokens.tolist() == free[row, :length].tolist() + [pad_token] * (10 - length)
    assert len(lengths) > 2


def test_a_sequence_can_stop_at_its_first_token(always_says):
    found = sample(always_says(7), UNEQUAL, SamplingSpec(3, stop_tokens=(7,)), seeded())
    assert found.mask.tolist() == [[True, False, False]] * 4
    assert found.tokens[:, 5:].tolist() == [[7, 0, 0]] * 4


def test_a_sequence_that_never_stops_counts_whole(always_says):
    found = sample(always_says(7), UNEQUAL, SamplingSpec(3, stop_tokens=(8, 9)), seeded())
    assert found.mask.all()
    assert (found.tokens[:, 5:] == 7).all()


def test_the_end_of_sequence_token_stops_only_when_asked(always_says):
    policy = always_says(0)
    stopped = sample(policy, UNEQUAL, SamplingSpec(3, stop_at_eos=True), seeded())
    assert stopped.mask.tolist() == [[True, False, False]] * 4
    assert sample(policy, UNEQUAL, SamplingSpec(3), seeded()).mask.all()


def test_a_stop_token_in_the_prompt_does_not_stop(gpt2):
    assert_agrees(gpt2, [[9, 4], [9]], SamplingSpec(6, stop_tokens=(9,)))


def test_stop_at_eos_adds_the_tokenizers_token_to_the_stop_tokens(llama_tokenizer):
    assert set(SamplingSpec(3, stop_at_eos=True, stop_tokens=(8,)).stops(llama_tokenizer)) == {8, 2}
    assert SamplingSpec(3, stop_tokens=(8,)).stops(llama_tokenizer) == (8,)
    assert SamplingSpec(3, stop_tokens=(8,)).stops(None) == (8,)


def test_stop_at_eos_without_a_tokenizer_is_refused(without_tokenizer):
    with pytest.raises(ConfigError, match="stop_at_eos=True"):
        sample(without_tokenizer, EQUAL, SamplingSpec(3, stop_at_eos=True))


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.5}])
def test_the_probabilities_of_all_tokens_that_can_be_drawn_sum_to_one(gpt2, settings):
    found = sample(gpt2, [[4, 9, 13]] * 4000, SamplingSpec(1, **settings), seeded())
    by_token = dict(zip(found.tokens[:, -1].tolist(), found.logprobs[:, 0].tolist(), strict=True))
    total = sum(math.exp(logprob) for logprob in by_token.values())
    if settings == {"temperature": 0.5}:
        rare_tokens_never_drawn = 21 * 10 / 4000
        assert 1 - rare_tokens_never_drawn < total < 1 + 1e-5
    else:
        assert total == pytest.approx(1, abs=1e-5)
        assert sorted(by_token) == sorted(found.support.tokens[0, 0][found.support.kept[0, 0]])


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 3},
        {"top_p": 0.6},
        {"top_k": 6, "top_p": 0.7, "temperature": 1.7},
        {"top_k": 4, "temperature": 0.4},
    ],
    ids=str,
)
def test_scoring_on_the_kept_support_gives_the_logprobs_of_the_sampler(policy, settings):
    """Sampler and scorer are one distribution: the ratio of an untrained policy is 1."""
    spec = SamplingSpec(8, **settings)
    found = sample(policy, UNEQUAL, spec, seeded())
    logits, values = policy(found.tokens, attention_mask=found.attention_mask)
    plain = get_logprobs(logits, found.tokens, found.prefix_len)
    restricted = found.support.restrict(logits / spec.temperature, found.prefix_len)
    logprobs = get_logprobs(restricted, found.tokens, found.prefix_len)
    torch.testing.assert_close(logprobs, found.logprobs, atol=1e-5, rtol=0)
    every = log_probs(generated_logits(logits, found.prefix_len), spec.temperature)
    gathered = found.support.token_logprobs(every, found.tokens[:, found.prefix_len :])
    torch.testing.assert_close(gathered, found.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(values[:, 4:-1], found.values, atol=1e-5, rtol=0)
    assert (plain - found.logprobs).abs().max() > 0.1, "truncation has to matter here"


def test_the_support_lists_the_tokens_that_each_step_allowed(policy):
    spec = SamplingSpec(6, top_k=7, top_p=0.8)
    found = sample(policy, UNEQUAL, spec, seeded())
    logits, _ = policy(found.tokens, attention_mask=found.attention_mask)
    widths = set()
    for row in range(len(UNEQUAL)):
        for step in range(6):
            expected = allowed_tokens(logits[row, found.prefix_len - 1 + step].tolist(), 7, 0.8)
            kept = found.support.kept[row, step]
            assert sorted(found.support.tokens[row, step][kept].tolist()) == sorted(expected)
            widths.add(len(expected))
    assert len(widths) > 1 and found.support.tokens.shape[-1] == max(widths)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"top_p": 1.0}, {"temperature": 0.5}])
def test_no_support_is_kept_where_nothing_is_truncated(policy, settings):
    assert sample(policy, EQUAL, SamplingSpec(2, **settings), seeded()).support is None


def test_restrict_removes_only_what_is_outside_the_support():
    """One row, prefix 2, two generated tokens: the states at positions 1 and 2 are restricted."""
    logits = torch.arange(16.0).reshape(1, 4, 4)
    tokens = torch.tensor([[[3, 1], [0, 2]]])
    kept = torch.tensor([[[True, True], [True, False]]])
    expected = torch.tensor(
        [[[0.0, 1, 2, 3], [-INF, 5, -INF, 7], [8, -INF, -INF, -INF], [12, 13, 14, 15]]]
    )
    assert torch.equal(Support(tokens, kept).restrict(logits, 2), expected)
    assert torch.equal(logits, torch.arange(16.0).reshape(1, 4, 4))


def test_restrict_lets_the_gradient_through_inside_the_support_only():
    logits = torch.zeros(1, 3, 4, requires_grad=True)
    support = Support(torch.tensor([[[3, 1]]]), torch.tensor([[[True, True]]]))
    restricted = support.restrict(logits, 2)
    restricted[:, 1].log_softmax(-1)[0, 1].backward()
    assert torch.equal(logits.grad[0, 1], torch.tensor([0.0, 0.5, 0.0, -0.5]))


def test_support_token_logprobs_match_hand_computed():
    # (1/2, 1/4, 1/4) within {2, 0}: token 2 has 1/3; token 1, kept in the second row only, has 1/4
    logits = torch.tensor([[[math.log(2), 0, 0], [math.log(2), 0, 0]]], requires_grad=True)
    tokens = torch.tensor([[[2, 0, 1], [0, 1, 2]]])
    kept = torch.tensor([[[True, True, False], [True, True, True]]])
    support = Support(tokens, kept)
    logprobs = support.token_logprobs(log_probs(logits), torch.tensor([[2, 1]]))
    assert logprobs[0].tolist() == pytest.approx([math.log(1 / 3), math.log(1 / 4)])
    logprobs[0, 0].backward()
    expected = torch.tensor([[-2 / 3, 0, 2 / 3], [0, 0, 0]])
    torch.testing.assert_close(logits.grad[0], expected)
    outside = support.token_logprobs(log_probs(logits), torch.tensor([[1, 1]]))
    assert outside[0, 0] == -INF and outside[0, 1].isfinite()


@given(st.integers(1, 3), st.integers(1, 4), st.integers(2, 9), st.integers(0, 1000))
@hypothesis_settings(max_examples=30, deadline=None)
def test_support_token_logprobs_match_restricted_logits(batch, gen, d_vocab, seed):
    """In value and gradient, as `get_logprobs` scores what `restrict` leaves."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, gen + 1, d_vocab, generator=draw, dtype=torch.float64) * 5
    tokens = torch.rand(batch, gen, d_vocab, generator=draw).argsort(-1)[..., :4]
    kept = torch.rand(tokens.shape, generator=draw) < 0.6
    kept[..., 0] = True
    support, weight = Support(tokens, kept), torch.rand(batch, gen, generator=draw)
    chosen = tokens[..., 0]
    one, other = (logits.clone().requires_grad_() for _ in "ab")
    got = support.token_logprobs(log_probs(one[:, :-1], 0.7), chosen)
    shifted = torch.cat([chosen[:, :1], chosen], 1)
    expected = get_logprobs(support.restrict(other, 1), shifted, 1, 0.7)
    torch.testing.assert_close(got, expected)
    (got * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(one.grad, other.grad)


def test_support_token_logprobs_stay_finite_when_nothing_is_kept():
    logits = torch.tensor([[[0.0, -INF, 1.0]]], requires_grad=True)
    support = Support(torch.tensor([[[0, 1]]]), torch.tensor([[[False, False]]]))
    logprobs = support.token_logprobs(log_probs(logits), torch.tensor([[0]]))
    assert logprobs.item() == -INF
    masked_mean(logprobs, torch.tensor([[False]])).backward()
    assert (logits.grad == 0).all()


def test_rows_of_a_support_are_chosen_by_index():
    tokens = torch.arange(12).reshape(3, 2, 2)
    kept = torch.tensor([[[True, False]] * 2, [[True, True]] * 2, [[False, True]] * 2])
    chosen = Support(tokens, kept)[torch.tensor([2, 0])]
    assert torch.equal(chosen.tokens, torch.stack([tokens[2], tokens[0]]))
    assert torch.equal(chosen.kept, torch.stack([kept[2], kept[0]]))


def test_what_widens_a_support_takes_no_token_away():
    """Token 0, with which the narrower of two supports is filled up, is kept in it."""
    narrow = Support(torch.tensor([[[0, 2]]]), torch.tensor([[[True, True]]]))
    wide = Support(torch.tensor([[[3, 1, 0]]]), torch.tensor([[[True, True, True]]]))
    plain = samples_of(tokens=[[1, 0]], prompt_mask=[[1]], mask=[[1]])
    parts = [dataclasses.replace(plain, support=support) for support in (narrow, wide)]
    restricted = join_samples(parts, 0).support.restrict(torch.zeros(2, 2, 4), 1)
    expected = torch.tensor([[True, False, True, False], [True, True, False, True]])
    assert torch.equal(restricted[:, 0].isfinite(), expected)


def test_top_k_keeps_the_k_largest():
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0], [0.0, -1.0, -2.0, -3.0]])
    expected = torch.tensor([[-INF, 4.0, -INF, 3.0], [0.0, -1.0, -INF, -INF]])
    assert torch.equal(top_k_filter(logits, 2), expected)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_of_equal_logits_top_k_keeps_exactly_k(k):
    assert top_k_filter(torch.zeros(2, 5), k).isfinite().sum(-1).tolist() == [k, k]


@pytest.mark.parametrize("k", [4, 5, 1000])
def test_top_k_of_the_whole_vocabulary_or_more_keeps_all(k):
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0]])
    assert torch.equal(top_k_filter(logits, k), logits)


@pytest.mark.parametrize(
    ("p", "kept"),
    [
        (0.3, [False, True, False, False]),
        (0.45, [False, True, False, True]),
        (0.69, [False, True, False, True]),
        (0.75, [False, True, True, True]),
        (0.95, [True, True, True, True]),
        (1.0, [True, True, True, True]),
        (1e-9, [False, True, False, False]),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(p, kept):
    """Probabilities .1 .4 .2 .3: sorted .4 .3 .2 .1, reached .4 .7 .9 1.0."""
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log() + 5
    filtered = SamplingSpec(1, top_p=p).filter(logits)
    assert filtered.isfinite()[0].tolist() == kept
    assert torch.equal(filtered[filtered.isfinite()], logits[filtered.isfinite()])


def test_top_p_stops_at_the_token_that_reaches_p_exactly():
    """Probabilities 1/2, 1/4, 1/8, 1/8 are exact in binary: 3/4 is reached by the first two."""
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log2() * math.log(2)
    assert SamplingSpec(1, top_p=0.75).filter(logits).isfinite().sum() == 2


def test_top_p_treats_each_row_by_itself():
    """Probabilities .9 .05 .05 reach .6 with one token; .4 .3 .3 with two."""
    logits = torch.tensor([[0.9, 0.05, 0.05], [0.4, 0.3, 0.3]]).log()
    assert SamplingSpec(1, top_p=0.6).filter(logits).isfinite().sum(-1).tolist() == [1, 2]


def test_the_filters_keep_leading_axes():
    logits = torch.randn(2, 3, 5, generator=seeded())
    for spec in (SamplingSpec(1, top_k=2), SamplingSpec(1, top_p=0.5)):
        assert spec.filter(logits).shape == (2, 3, 5)
    assert SamplingSpec(1, top_k=2).filter(logits[0, 0]).isfinite().sum() == 2


def test_the_spec_divides_by_the_temperature_and_then_truncates():
    """Probabilities .5 .3 .2 at temperature 1/2 become .25 .09 .04 over .38: .658 .237 .105.

    p = .6 is reached by the first alone; at temperature 1 it takes two tokens.
    """
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    cold = SamplingSpec(1, temperature=0.5, top_p=0.6).filter(logits)
    assert cold.isfinite()[0].tolist() == [True, False, False]
    warm = SamplingSpec(1, top_p=0.6).filter(logits)
    assert warm.isfinite()[0].tolist() == [True, True, False]
    probs = SamplingSpec(1, temperature=0.5).filter(logits).softmax(-1)
    expected = torch.tensor([[0.25, 0.09, 0.04]]) / 0.38
    torch.testing.assert_close(probs, expected, atol=1e-6, rtol=0)


def test_top_p_counts_the_probability_that_top_k_left():
    """Probabilities .4 .3 .2 .1; after top-2 they are .571 .429, so p = .5 keeps one token.

    Of the untouched probabilities, .5 would take two.
    """
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert SamplingSpec(1, top_k=2, top_p=0.5).filter(logits).isfinite().sum() == 1
    assert SamplingSpec(1, top_p=0.5).filter(logits).isfinite().sum() == 2


@pytest.mark.parametrize(
    ("settings", "truncates"),
    [
        ({}, False),
        ({"temperature": 0.1}, False),
        ({"top_p": 1.0}, False),
        ({"top_p": 0.99}, True),
        ({"top_k": 50}, True),
    ],
)
def test_the_spec_says_whether_it_truncates(settings, truncates):
    assert SamplingSpec(1, **settings).truncates is truncates


def test_the_spec_takes_every_sampling_field_of_the_arguments():
    args = RLHFArgs(gen_len=7, temperature=0.3, top_k=4, top_p=0.9, stop_at_eos=True)
    expected = SamplingSpec(gen_len=7, temperature=0.3, top_k=4, top_p=0.9, stop_at_eos=True)
    assert SamplingSpec.from_args(args) == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gen_len", 0),
        ("gen_len", -1),
        ("temperature", 0.0),
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", 0),
        ("top_k", -5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", -0.1),
        ("top_p", math.nan),
    ],
)
def test_a_spec_value_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ConfigError) as caught:
        SamplingSpec(**({"gen_len": 4} | {field: value}))
    assert f"{field}={value}" in str(caught.value) and "\n" not in str(caught.value)


def test_a_response_that_exceeds_the_context_is_refused_with_the_longest_that_fits(gpt2):
    with pytest.raises(ConfigError, match=r"gen_len=20 after a prompt of 5 .* 24.* at most 19"):
        sample(gpt2, UNEQUAL, SamplingSpec(20))
    assert sample(gpt2, UNEQUAL, SamplingSpec(19), seeded()).tokens.shape == (4, 24)


@pytest.mark.parametrize("length", [24, 30])
def test_a_prompt_that_fills_the_context_is_not_answered_with_an_impossible_gen_len(gpt2, length):
    with pytest.raises(ConfigError) as caught:
        sample(gpt2, [[4] * length], SamplingSpec(2))
    assert "at most 0" not in str(caught.value) and "at most -" not in str(caught.value)


@pytest.mark.parametrize("prompts", [[[4], []], [[]], []])
def test_an_empty_prompt_is_refused(gpt2, prompts):
    with pytest.raises(ConfigError, match="empty"):
        sample(gpt2, prompts, SamplingSpec(2))


def test_prompts_are_padded_on_the_left_by_hand():
    tokens, mask = pad_prompts([[1, 2, 3], [4], [5, 6]], 9, torch.device("cpu"))
    assert tokens.tolist() == [[1, 2, 3], [9, 9, 4], [9, 5, 6]]
    assert mask.tolist() == [[True] * 3, [False, False, True], [False, True, True]]


def test_prompts_are_tokenized_with_bos_when_asked_only(llama_tokenizer):
    """w0 is token 4, after <unk>, <s>, </s> and <pad>; <s> is 1."""
    assert tokenize_prompts(llama_tokenizer, ["w0 w3", "w1"], False) == [[4, 7], [5]]
    assert tokenize_prompts(llama_tokenizer, ["w0 w3", "w1"], True) == [[1, 4, 7], [1, 5]]


def test_special_tokens_that_the_tokenizer_adds_by_itself_are_left_out(llama_tokenizer):
    """Many tokenizers close a text with EOS, after which the policy would have nothing to say."""
    tokenizer = copy.deepcopy(llama_tokenizer)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert tokenizer.encode("w0") == [1, 4, 2]
    assert tokenize_prompts(tokenizer, ["w0"], False) == [[4]]
    assert tokenize_prompts(tokenizer, ["w0"], True) == [[1, 4]]


def test_an_empty_prompt_with_bos_is_the_bos_token(llama_tokenizer):
    assert tokenize_prompts(llama_tokenizer, [""], True) == [[1]]


def test_bos_from_a_tokenizer_that_has_none_is_refused(llama_tokenizer):
    tokenizer = copy.deepcopy(llama_tokenizer)
    tokenizer.bos_token = None
    with pytest.raises(ConfigError, match="prepend_bos=True"):
        tokenize_prompts(tokenizer, ["w0"], True)


def samples_of(tokens, prompt_mask, mask):
    mask = torch.tensor(mask).bool()
    numbers = torch.zeros(mask.shape)
    return Samples(
        tokens=torch.tensor(tokens),
        prompt_mask=torch.tensor(prompt_mask).bool(),
        mask=mask,
        logprobs=numbers,
        values=numbers,
        support=None,
    )


def test_texts_hold_no_special_token_and_nothing_after_the_stop(llama_tokenizer):
    """<s> is 1, </s> 2, <pad> 3 and w0 4: padding, BOS, EOS and the words after it all go."""
    samples = samples_of(
        tokens=[[1, 4, 5, 6, 2, 7, 7], [3, 1, 5, 8, 9, 10, 11]],
        prompt_mask=[[1, 1, 1], [0, 1, 1]],
        mask=[[1, 1, 0, 0], [1, 1, 1, 1]],
    )
    assert samples.texts(llama_tokenizer) == ["w0 w1 w2", "w1 w4 w5 w6 w7"]


def test_texts_drop_padding_that_is_an_ordinary_word(llama_tokenizer):
    samples = samples_of(tokens=[[4, 4, 5, 6, 4, 4]], prompt_mask=[[0, 0, 1]], mask=[[1, 0, 0]])
    assert samples.texts(llama_tokenizer) == ["w1 w2"]


def test_texts_keep_a_stop_token_that_is_an_ordinary_word(always_says, gpt2_tokenizer):
    """Token 7 is w6; the prompt 4, 9 is w3 w8, after BOS."""
    found = sample(always_says(7), [[0, 4, 9]], SamplingSpec(3, stop_tokens=(7,)), seeded())
    assert found.texts(gpt2_tokenizer) == ["w3 w8 w6"]


def test_texts_run_on_past_an_end_of_sequence_that_does_not_stop(llama_tokenizer):
    samples = samples_of(tokens=[[1, 4, 2, 5]], prompt_mask=[[1, 1]], mask=[[1, 1]])
    assert samples.texts(llama_tokenizer) == ["w0 w1"]


def test_reel_samples_score_as_texts_without_bos():
    """The bundled model with its own tokenizer: BOS in the prompt, none in the text."""
    policy = TransformerWithValueHead(load_model("reel-nano"))
    tokenizer = policy.base_model.tokenizer
    prompts = tokenize_prompts(tokenizer, ["this movie"], True) * 8
    assert prompts[0][0] == tokenizer.bos_token_id
    found = sample(policy, prompts, SamplingSpec(26, stop_at_eos=True), seeded())
    texts = found.texts(tokenizer)
    assert all(text.startswith("this movie ") for text in texts)
    assert not any("<" in text for text in texts)


def test_tokenize_prompts_never_doubles_bos(gpt2_tokenizer):
    bos = gpt2_tokenizer.bos_token
    once = [gpt2_tokenizer.bos_token_id, *gpt2_tokenizer.encode("w1", add_special_tokens=False)]
    assert tokenize_prompts(gpt2_tokenizer, ["w1", f"{bos} w1"], True) == [once, once]
