"""The sampler, compared with full forward passes without cache and padding on the same noise."""

import math

import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import HookedTransformer, TransformerWithValueHead
from rlhf_lab.sampling import SamplingSpec, sample, sample_without_cache, sampling_noise
from tests.tiny_models import policy_on

VALUE_HOOK = "ln_final.hook_normalized"
INF = math.inf
EQUAL = [[4, 9, 13]] * 4
UNEQUAL = [[4, 9, 13], [7], [12, 4, 19, 6, 8], [7, 5]]
REPEATED = [[4, 9], [7, 5, 8], [4, 9], [7, 5, 8], [4, 9], [6]]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_noise_is_the_same_with_another_default_dtype():
    noise = sampling_noise(3, 4, seeded())
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(sampling_noise(3, 4, seeded()), noise)
    finally:
        torch.set_default_dtype(torch.float32)


def allowed_tokens(logits, top_k, top_p):
    """Return the token ids that survive top-k and then top-p, from a sorted list."""
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
    """Run one full forward pass per step and row, on the real tokens only."""
    model, stops = policy.base_model, spec.stops(policy.base_model.tokenizer)
    rows = [list(prompt) for prompt in prompts]
    tokens, mask, logprobs, values = ([[] for _ in rows] for _ in range(4))
    for noise in torch.rand(spec.gen_len, len(rows), generator=generator).tolist():
        for i, row in enumerate(rows):
            ids = torch.tensor([row])
            logits, cache = model.run_with_cache(
                ids, attention_mask=torch.ones_like(ids), names_filter=VALUE_HOOK
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


def assert_matches_uncached(policy, prompts, spec):
    found = sample(policy, prompts, spec, seeded())
    tokens, mask, logprobs, values = sample_uncached(policy, prompts, spec, seeded())
    assert found.mask.tolist() == mask
    real = torch.tensor(mask)
    generated = found.tokens[:, found.prefix_len :]
    assert generated[real].tolist() == torch.tensor(tokens)[real].tolist()
    for name, expected in (("logprobs", logprobs), ("values", values)):
        expected = torch.tensor(expected)[real]
        torch.testing.assert_close(getattr(found, name)[real], expected, atol=1e-5, rtol=0)
    assert len({tuple(row) for row in tokens}) > 1 or len(prompts) == 1
    return found


@pytest.fixture
def gpt2(gpt2_dir):
    return policy_on(gpt2_dir)


@pytest.fixture
def without_tokenizer(gpt2):
    model = HookedTransformer(gpt2.base_model.cfg)
    model.load_state_dict(gpt2.base_model.state_dict())
    return TransformerWithValueHead(model, gpt2.value_head)


MATCHES = [
    (EQUAL, {}),
    (UNEQUAL, {}),
    (REPEATED, {"temperature": 0.6}),
    (UNEQUAL, {"top_k": 5}),
    (EQUAL, {"top_p": 0.7}),
    (UNEQUAL, {"temperature": 1.5, "top_k": 12, "top_p": 0.8}),
    (REPEATED, {"stop_at_eos": True, "stop_tokens": (5, 9, 14)}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("prompts", "settings"), MATCHES, ids=str)
def test_cached_sampling_matches_uncached(policy, prompts, settings):
    assert_matches_uncached(policy, prompts, SamplingSpec(8, **settings))


@pytest.mark.slow
def test_model_without_tokenizer_samples_the_same(without_tokenizer):
    assert_matches_uncached(without_tokenizer, UNEQUAL, SamplingSpec(8, stop_tokens=(5,)))


@pytest.mark.slow
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_token_in_a_prompt_is_read(gpt2, side):
    """Token 0 is BOS, EOS and padding; after padding, [7] looks like [0, 7]."""
    gpt2.base_model.tokenizer.padding_side = side
    found = assert_matches_uncached(gpt2, [[0, 7], [7]], SamplingSpec(8))
    assert (found.values[0, 0] - found.values[1, 0]).abs() > 1e-3
    assert_matches_uncached(gpt2, [[0, 4, 0, 9], [0, 7], [0], [0, 0]], SamplingSpec(8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompts", "spec"),
    [
        ([[4, 9], [7, 5, 8, 6]], SamplingSpec(20)),  # the last position of the context
        ([[7]], SamplingSpec(6)),
        (UNEQUAL, SamplingSpec(1)),
        ([[9, 4], [9]], SamplingSpec(6, stop_tokens=(9,))),  # a stop token in the prompt
    ],
)
def test_edge_cases_match_uncached(gpt2, prompts, spec):
    found = assert_matches_uncached(gpt2, prompts, spec)
    assert found.mask.shape == found.logprobs.shape == (len(prompts), spec.gen_len)


def test_each_distinct_prompt_is_run_once(policy):
    shapes = []
    policy.base_model.add_hook("hook_embed", lambda x, hook: shapes.append(tuple(x.shape[:2])))
    found = sample(policy, REPEATED, SamplingSpec(3), seeded())
    assert shapes == [(3, 3), (6, 1), (6, 1)] and found.prefix_len == 3
    pad_token = policy.base_model.tokenizer.pad_token_id
    assert found.tokens[1:3, :3].tolist() == [[7, 5, 8], [pad_token, 4, 9]]
    assert found.attention_mask[1:3].tolist() == [[True] * 6, [False] + [True] * 5]


@pytest.mark.slow
def test_generator_determines_the_samples(policy):
    """Without a generator, torch's global one does."""
    draw = lambda *seed: sample(policy, UNEQUAL, SamplingSpec(8), *map(seeded, seed)).tokens
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = draw(7)
    assert torch.equal(first, draw(7)) and not torch.equal(first, draw(8))
    assert torch.equal(torch.get_rng_state(), state)
    free = draw()
    assert not torch.equal(free, draw())
    torch.manual_seed(1)
    assert torch.equal(free, draw())


@pytest.mark.slow
@pytest.mark.parametrize("truncation", [{}, {"top_k": 3}, {"top_p": 0.7}], ids=str)
def test_noise_of_a_row_ignores_batch_parts(policy, truncation):
    spec, prompts = SamplingSpec(8, temperature=1.5, **truncation), UNEQUAL * 2
    whole = sample(policy, prompts, spec, seeded(3))
    for part_size in (1, 3, 9):
        cut = sample(policy, prompts, spec, seeded(3), part_size=part_size)
        assert torch.equal(cut.tokens, whole.tokens)
        assert torch.equal(cut.prompt_mask, whole.prompt_mask)
        for name in ("logprobs", "values", "residuals"):
            found, expected = getattr(cut, name), getattr(whole, name)
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
        if truncation:
            kept = whole.support.kept
            assert torch.equal(cut.support.kept, kept)
            assert torch.equal(cut.support.tokens[kept], whole.support.tokens[kept])
    some = sample(policy, prompts, spec, seeded(3), rows=slice(2, 5))
    assert torch.equal(some.tokens[:, -8:], whole.tokens[2:5, -8:])


def test_token_counts_match_the_probabilities(gpt2):
    """Counts of n draws are within 5 standard errors, sqrt(n p (1 - p)), of n p."""
    n = 4000
    found = sample(gpt2, [[4, 9, 13]] * n, SamplingSpec(1, temperature=1.5), seeded())
    counts = torch.bincount(found.tokens[:, -1], minlength=21).double()
    probs = (gpt2(torch.tensor([[4, 9, 13]]))[0][0, -1].double() / 1.5).softmax(-1).detach()
    assert (probs > 0.01).sum() > 3
    assert ((counts - n * probs).abs() <= 5 * (n * probs * (1 - probs)).sqrt() + 1).all()


def test_sample_without_cache_matches_sample(gpt2):
    model, prompts = gpt2.base_model, [[4, 9, 13], [7, 5, 8], [4, 9, 12]]
    found = sample(gpt2, prompts, SamplingSpec(6, temperature=1.5), seeded())
    noise = sampling_noise(3, 6, seeded())
    tokens = sample_without_cache(model, torch.tensor(prompts), noise, 1.5)
    assert torch.equal(tokens, found.tokens) and len(set(tokens[:, 3:].flatten().tolist())) > 3
    assert not torch.equal(tokens, sample_without_cache(model, torch.tensor(prompts), noise, 0.2))
    with pytest.raises(ConfigError, match="exceeds the model's context"):
        sample_without_cache(model, torch.tensor([[4, 9]]), sampling_noise(1, 23, seeded()))


def test_rows_end_at_their_first_stop_token(policy):
    """The noise of a row does not depend on stops, so a run without stops predicts each row."""
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


def test_batch_of_stopped_rows_ends_with_zeros(gpt2):
    found = sample(gpt2, UNEQUAL, SamplingSpec(3, stop_tokens=tuple(range(21))), seeded())
    assert found.mask.tolist() == [[True, False, False]] * 4
    assert (found.tokens[:, 6:] == 0).all()
    assert (found.values[:, 1:] == 0).all() and (found.logprobs[:, 1:] == 0).all()


@pytest.mark.usefixtures("no_type_checks")
def test_impossible_prompts_and_lengths_raise(gpt2, without_tokenizer):
    with pytest.raises(ConfigError, match=r"gen_len=20 after a prompt of 5 .* 24.* at most 19"):
        sample(gpt2, UNEQUAL, SamplingSpec(20))
    assert sample(gpt2, UNEQUAL, SamplingSpec(19), seeded()).tokens.shape == (4, 24)
    with pytest.raises(ConfigError, match="Shorten the prompt"):
        sample(gpt2, [[4] * 24], SamplingSpec(2))
    for prompts in (["this movie"], [[0.5]], [4, 9], {"input_ids": [[4]]}):
        with pytest.raises(
            ConfigError, match=r"prompts\[0\]=.* is empty or not a list of token ids"
        ):
            sample(gpt2, prompts, SamplingSpec(2))
    for wrong in ((gpt2, EQUAL, {"gen_len": 3}), (gpt2.base_model, EQUAL, SamplingSpec(3))):
        with pytest.raises(ConfigError, match="needs a TransformerWithValueHead and SamplingSpec"):
            sample(*wrong)
    for ids in ([4, -1], [4, 21]):
        with pytest.raises(ConfigError, match=r"prompts\[0\]=.*not a list of token ids from 0 to"):
            sample(gpt2, [ids], SamplingSpec(2))
        with pytest.raises(IndexError, match=rf"{min(ids)} to {max(ids)}, d_vocab="):
            gpt2(torch.tensor([ids]))
    for prompts in ([[4], []], []):
        with pytest.raises(ConfigError, match="empty"):
            sample(gpt2, prompts, SamplingSpec(2))
    with pytest.raises(ConfigError, match="stop_at_eos=True"):
        sample(without_tokenizer, EQUAL, SamplingSpec(3, stop_at_eos=True))
