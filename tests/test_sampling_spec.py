"""Parts of the sampler: filters by hand, support, draws, prompts and texts."""

import copy
import math

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import log_probs, masked_mean
from rlhf_lab.sampling import (
    Samples,
    SamplingSpec,
    Support,
    _Step,
    draw_token,
    sample,
    sampling_noise,
    tokenize_prompts,
)
from tests.test_sampling import INF, UNEQUAL, seeded


def test_restrict_removes_what_is_outside_the_support():
    """One row, prefix 2, two generated tokens: the states at positions 1 and 2 are restricted."""
    logits = torch.arange(16.0).reshape(1, 4, 4)
    tokens = torch.tensor([[[3, 1], [0, 2]]])
    kept = torch.tensor([[[True, True], [True, False]]])
    expected = torch.tensor(
        [[[0.0, 1, 2, 3], [-INF, 5, -INF, 7], [8, -INF, -INF, -INF], [12, 13, 14, 15]]]
    )
    assert torch.equal(Support(tokens, kept).restrict(logits, 2), expected)


def test_support_logprobs_outside_are_minus_infinity_without_nan():
    logits = torch.tensor([[[0.0, -INF, 1.0]]], requires_grad=True)
    support = Support(torch.tensor([[[0, 1]]]), torch.tensor([[[False, False]]]))
    logprobs = support.token_logprobs(log_probs(logits), torch.tensor([[0]]))
    assert logprobs.item() == -INF
    masked_mean(logprobs, torch.tensor([[False]])).backward()
    assert (logits.grad == 0).all()


KEPT = [  # probabilities .1 .4 .2 .3: sorted .4 .3 .2 .1, reached .4 .7 .9 1.0
    ({"top_k": 2}, [1, 3]),
    ({"top_k": 5}, [0, 1, 2, 3]),
    ({"top_p": 1e-9}, [1]),
    ({"top_p": 0.45}, [1, 3]),
    ({"top_p": 0.95}, [0, 1, 2, 3]),
    ({"top_k": 2, "top_p": 0.5}, [1]),  # after top-2: .571 .429
    ({"temperature": 0.5, "top_p": 0.5}, [1]),  # squares over .30: .53 first
    ({"temperature": 0.5, "top_p": 1.0}, [0, 1, 2, 3]),
]


def kept_logits(spec, logits):
    """Logits with -inf at the tokens that are never sampled."""
    kept, tokens = spec.candidates(logits)
    return kept if tokens is None else torch.full_like(logits, -torch.inf).scatter(-1, tokens, kept)


@pytest.mark.parametrize(("values", "kept"), KEPT, ids=str)
def test_candidates_are_the_tokens_counted_by_hand(values, kept):
    spec = SamplingSpec(1, **values)
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log() + 5
    filtered = kept_logits(spec, torch.stack([logits, logits.flip(-1)]))
    assert filtered[0, 0].isfinite().nonzero()[:, 0].tolist() == kept
    assert torch.equal(filtered[0].flip(-1), filtered[1])
    scaled = logits / spec.temperature
    assert torch.equal(filtered[0, 0, kept], scaled[0, kept])
    assert spec.truncates == ("top_k" in values or values.get("top_p", 1) < 1)


def test_ties_keep_exactly_k_and_stop_at_p():
    for k in (1, 3):
        kept = kept_logits(SamplingSpec(1, top_k=k), torch.zeros(2, 5))
        assert kept.isfinite().sum(-1).tolist() == [k, k]
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log2() * math.log(2)  # exact in binary
    assert kept_logits(SamplingSpec(1, top_p=0.75), logits).isfinite().sum() == 2
    rows = torch.tensor([[0.9, 0.05, 0.05], [0.4, 0.3, 0.3]]).log()
    assert kept_logits(SamplingSpec(1, top_p=0.6), rows).isfinite().sum(-1).tolist() == [1, 2]


def test_stops_include_eos_and_stop_tokens(llama_tokenizer):
    values = dict(gen_len=7, temperature=0.3, top_k=4, top_p=0.9, stop_at_eos=True)
    assert SamplingSpec.from_args(RLHFArgs(**values)) == SamplingSpec(**values)
    assert set(SamplingSpec(3, stop_at_eos=True, stop_tokens=(8,)).stops(llama_tokenizer)) == {8, 2}
    assert SamplingSpec(3, stop_tokens=(8,)).stops(None) == (8,)
    for ids in ((8, 99_999), (8, -1)):
        with pytest.raises(ConfigError, match="stop token ids .* must be from 0"):
            SamplingSpec(3, stop_tokens=ids).stops(llama_tokenizer)
    assert SamplingSpec.from_args(RLHFArgs(stop_token_ids="5,8")).stop_tokens == (5, 8)


@pytest.mark.parametrize(
    ("field", "value"), [("gen_len", 0), ("temperature", 0.0), ("top_k", 0), ("top_p", 1.01)]
)
def test_value_out_of_range_raises(field, value):
    with pytest.raises(ConfigError, match=f"{field}={value}"):
        SamplingSpec(**({"gen_len": 4} | {field: value}))


def test_draws_match_hand_computed():
    """Probabilities .1 .4 0 .3 .2 reach .1, .5, .5, .8 and 1; 1/4 1/4 0 1/2 are exact."""
    logprobs = torch.tensor([0.1, 0.4, 0.0, 0.3, 0.2]).log().expand(7, 5)
    noise = torch.tensor([0.0, 0.0999, 0.1001, 0.4999, 0.5001, 0.7999, 0.8001])
    assert draw_token(logprobs, noise).tolist() == [0, 0, 1, 1, 3, 3, 4]
    assert torch.equal(draw_token(logprobs - math.log(2), noise), draw_token(logprobs, noise))
    exact = torch.tensor([0.25, 0.25, 0.0, 0.5]).log2().mul(math.log(2)).expand(3, 4).double()
    edges = torch.tensor([0.0, 0.25, 0.5], dtype=torch.float64)
    assert draw_token(exact, edges).tolist() == [0, 1, 3]


@pytest.mark.parametrize("d_vocab", [1, 72, 50_257])
@pytest.mark.parametrize("end", ["first", "last"])
def test_token_of_probability_0_is_never_drawn(d_vocab, end):
    logits = torch.randn(20, d_vocab, generator=seeded())
    excluded = slice(0, d_vocab // 2) if end == "first" else slice(d_vocab - d_vocab // 2, d_vocab)
    logits[:, excluded] = -INF
    for noise in (0.0, 1 - 2**-24):
        drawn = draw_token(logits.log_softmax(-1), torch.full((20,), noise))
        assert logits.gather(-1, drawn[:, None]).isfinite().all()
    noise = sampling_noise(3, 1000, seeded())
    assert noise.shape == (1000, 3) and 0 <= noise.min() and noise.max() <= 1 - 2**-24


def test_nuclei_of_a_wide_vocabulary_are_cut_to_their_width(policy, monkeypatch):
    spec = SamplingSpec(6, top_p=0.8)
    whole = sample(policy, UNEQUAL, spec, seeded())
    monkeypatch.setattr("rlhf_lab.sampling.WIDEST_KEPT", 2)
    cut, widths = sample(policy, UNEQUAL, spec, seeded()), set()
    take = _Step.take
    monkeypatch.setattr(_Step, "take", lambda *a: widths.add((s := take(*a)).kept.shape[1]) or s)
    sample(policy, UNEQUAL, spec, seeded())
    assert torch.equal(cut.tokens, whole.tokens) and len(widths) > 1
    assert torch.equal(cut.support.kept, whole.support.kept)
    kept = cut.support.kept
    assert torch.equal(cut.support.tokens[kept], whole.support.tokens[kept])


def test_tokenize_prompts_adds_one_bos_only(llama_tokenizer):
    """w0 is token 4, after <unk>, <s>, </s> and <pad>; <s> is 1."""
    tokenizer = copy.deepcopy(llama_tokenizer)
    assert tokenize_prompts(tokenizer, ["w0 w3", "w1"], False) == [[4, 7], [5]]
    assert tokenize_prompts(tokenizer, ["w0 w3", "<s> w1", ""], True) == [[1, 4, 7], [1, 5], [1]]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert tokenizer.encode("w0") == [1, 4, 2]
    assert tokenize_prompts(tokenizer, ["w0"], True) == [[1, 4]]
    tokenizer.bos_token = None
    with pytest.raises(ConfigError, match="prepend_bos=True"):
        tokenize_prompts(tokenizer, ["w0"], True)


@pytest.mark.parametrize(
    ("tokens", "prompt_mask", "mask", "texts"),
    [  # <s> is 1, </s> 2, <pad> 3 and w0 4
        (
            [[1, 4, 5, 6, 2, 7, 7], [3, 1, 5, 8, 9, 10, 11]],
            [[1, 1, 1], [0, 1, 1]],
            [[1, 1, 0, 0], [1, 1, 1, 1]],
            ["w0 w1 w2", "w1 w4 w5 w6 w7"],
        ),
        ([[4, 4, 5, 6, 4, 4]], [[0, 0, 1]], [[1, 0, 0]], ["w1 w2"]),  # padding is a word
        ([[1, 4, 2, 5]], [[1, 1]], [[1, 1]], ["w0 w1"]),  # EOS that does not stop
        ([[1, 4, 5, 6]], [[1]], [[0, 1, 0]], ["w0 w1"]),  # a token that does not count
    ],
)
def test_texts_end_at_the_stop(llama_tokenizer, tokens, prompt_mask, mask, texts):
    mask = torch.tensor(mask).bool()
    numbers, prompt_mask = torch.zeros(mask.shape), torch.tensor(prompt_mask).bool()
    samples = Samples(torch.tensor(tokens), prompt_mask, mask, numbers, numbers, None)
    assert samples.texts(llama_tokenizer) == texts
