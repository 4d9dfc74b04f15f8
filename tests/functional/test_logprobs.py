"""Log-probabilities, values and logits of the generated tokens."""

import math
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor
from torch.distributions import Categorical

from rlhf_lab.functional import (
    LOG_ZERO,
    generated_logits,
    generated_values,
    get_logprobs,
    get_max_logprobs,
    log_probs,
    token_logprobs,
)

INF, NAN = math.inf, math.nan
LOG3 = math.log(3)


def gathered(logits, tokens, prefix_len, temperature=1.0):
    """An independent formulation: the whole log-softmax first, then gather, then slice."""
    logprobs = torch.log_softmax(logits / temperature, dim=-1)[:, :-1]
    return logprobs.gather(-1, tokens[:, 1:, None]).squeeze(-1)[:, prefix_len - 1 :]


def test_logprobs_by_hand():
    # position 0: (1/2, 1/2), next token 1; position 1: (1/4, 3/4), next token 0; position 2 unused
    logits = tensor([[[0.0, 0.0], [0.0, LOG3], [9.0, -9.0]]])
    tokens = tensor([[0, 1, 0]])
    both = [math.log(1 / 2), math.log(1 / 4)]
    assert get_logprobs(logits, tokens)[0].tolist() == pytest.approx(both)
    assert get_logprobs(logits, tokens, prefix_len=1)[0].tolist() == pytest.approx(both)
    assert get_logprobs(logits, tokens, prefix_len=2)[0].tolist() == pytest.approx(both[1:])


def test_temperature_divides_the_logits():
    # exp(log 3 / 2) = sqrt 3: probability of token 0 is 1 / (1 + sqrt 3)
    logits, tokens = tensor([[[0.0, LOG3], [0.0, 0.0]]]), tensor([[1, 0]])
    got = get_logprobs(logits, tokens, 1, temperature=2.0).item()
    assert got == pytest.approx(-math.log(1 + math.sqrt(3)))


@given(
    st.integers(1, 3), st.integers(2, 6), st.integers(2, 5), st.data(), st.sampled_from([0.5, 1.0])
)
@settings(max_examples=30, deadline=None)
def test_equals_gather_in_value_and_gradient(batch, seq, d_vocab, data, temperature):
    prefix_len = data.draw(st.integers(1, seq - 1))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(batch, seq, d_vocab, dtype=torch.float64)
    tokens = torch.randint(0, d_vocab, (batch, seq))
    one, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    got = get_logprobs(one, tokens, prefix_len, temperature)
    expected = gathered(other, tokens, prefix_len, temperature)
    assert got.shape == (batch, seq - prefix_len)
    torch.testing.assert_close(got, expected)
    weight = torch.randn_like(got)
    (got * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(one.grad, other.grad)


def test_prompt_positions_and_the_last_position_get_no_gradient():
    logits = torch.randn(2, 5, 4, requires_grad=True)
    get_logprobs(logits, torch.randint(0, 4, (2, 5)), prefix_len=3).sum().backward()
    touched = logits.grad.abs().sum(dim=(0, 2)) > 0
    # states before the two generated tokens stand at positions 2 and 3
    assert touched.tolist() == [False, False, True, True, False]


def test_gradient_agrees_with_finite_differences():
    torch.manual_seed(0)
    logits = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, 3, (2, 4))
    assert torch.autograd.gradcheck(lambda z: get_logprobs(z, tokens, 2, 0.7), logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_normalized_in_float32(dtype):
    torch.manual_seed(0)
    logits, tokens = torch.randn(2, 4, 50).to(dtype), torch.randint(0, 50, (2, 4))
    got = get_logprobs(logits, tokens, 2)
    assert got.dtype == torch.float32
    expected = gathered(logits.double(), tokens, 2)
    torch.testing.assert_close(got.double(), expected, atol=1e-6, rtol=0)


def test_extreme_logits_stay_finite_and_filtered_tokens_have_probability_zero():
    logits = tensor([[[3e38, -3e38], [-math.inf, 5.0], [0.0, 0.0]]])
    # certain of token 0; token 0 filtered, so token 1 is certain
    assert get_logprobs(logits, tensor([[1, 0, 1]]))[0].tolist() == [0.0, 0.0]
    assert get_logprobs(logits, tensor([[1, 0, 0]]))[0, 1].item() == -math.inf


def test_one_sequence_of_one_generated_token():
    assert get_logprobs(torch.zeros(1, 2, 4), tensor([[0, 3]]), 1).tolist() == [
        [pytest.approx(-math.log(4))]
    ]


@pytest.mark.parametrize("prefix_len", [0, -1, 4, 5])
def test_a_prefix_that_leaves_no_state_or_no_token_is_refused(prefix_len):
    logits, tokens, values = torch.zeros(1, 4, 3), torch.zeros(1, 4).long(), torch.zeros(1, 4)
    for call in (
        lambda: get_logprobs(logits, tokens, prefix_len),
        lambda: get_max_logprobs(logits, prefix_len),
        lambda: generated_values(values, prefix_len),
        lambda: generated_logits(logits, prefix_len),
    ):
        with pytest.raises(ValueError, match=f"prefix_len is {prefix_len} .* 4 tokens"):
            call()


@pytest.mark.parametrize("token", [-1, -100])
def test_get_logprobs_raises_on_a_negative_token_id(token):
    with pytest.raises(ValueError, match="Token ids must be at least 0"):
        get_logprobs(torch.zeros(1, 3, 4), tensor([[0, 1, token]]))


@pytest.mark.usefixtures("no_type_checks")
def test_get_logprobs_raises_on_another_batch_size():
    with pytest.raises(ValueError, match=r"tokens has shape \(1, 4\), expected \(2, 4\)"):
        get_logprobs(torch.zeros(2, 4, 3), torch.zeros(1, 4).long())


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature"):
        get_logprobs(torch.zeros(1, 2, 3), torch.zeros(1, 2).long(), 1, temperature)
    with pytest.raises(ValueError, match="temperature"):
        get_max_logprobs(torch.zeros(1, 2, 3), 1, temperature)


def test_no_warning_reaches_the_user_and_the_filters_stay_as_they_were():
    logits, tokens = torch.randn(2, 4, 3), torch.randint(0, 3, (2, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = list(warnings.filters)
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda _: get_logprobs(logits, tokens, 2), range(32)))
        assert warnings.filters == before
    assert all(torch.equal(r, results[0]) for r in results)


def test_list_indexing_outside_the_function_is_untouched():
    get_logprobs(torch.zeros(1, 2, 3), torch.zeros(1, 2).long(), 1)
    assert torch.arange(6).reshape(3, 2)[[0, 2]].tolist() == [[0, 1], [4, 5]]


def test_max_logprobs_by_hand():
    # position 0: (1/2, 1/2); position 1: (1/4, 3/4); position 2 predicts nothing
    logits = tensor([[[0.0, 0.0], [0.0, LOG3], [9.0, -9.0]]])
    both = [math.log(1 / 2), math.log(3 / 4)]
    assert get_max_logprobs(logits)[0].tolist() == pytest.approx(both)
    assert get_max_logprobs(logits, prefix_len=1)[0].tolist() == pytest.approx(both)
    assert get_max_logprobs(logits, prefix_len=2)[0].tolist() == pytest.approx(both[1:])
    # at temperature 2, token 1 of position 1 has sqrt 3 / (1 + sqrt 3)
    warm = get_max_logprobs(logits, 2, temperature=2.0).item()
    assert warm == pytest.approx(math.log(math.sqrt(3) / (1 + math.sqrt(3))))


@given(
    st.integers(1, 3), st.integers(2, 6), st.integers(2, 5), st.data(), st.sampled_from([0.5, 1.0])
)
@settings(max_examples=30, deadline=None)
def test_max_logprobs_are_the_largest_of_all_tokens_tried_in_turn(
    batch, seq, d_vocab, data, temperature
):
    """Each token in every place, in value and gradient; ties have measure zero."""
    prefix_len = data.draw(st.integers(1, seq - 1))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(batch, seq, d_vocab, dtype=torch.float64)
    one, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    got = get_max_logprobs(one, prefix_len, temperature)
    of_each = [
        gathered(other, torch.full((batch, seq), token), prefix_len, temperature)
        for token in range(d_vocab)
    ]
    expected = torch.stack(of_each).amax(0)
    torch.testing.assert_close(got, expected)
    assert -math.log(d_vocab) - 1e-9 <= got.min() and got.max() <= 0
    weight = torch.randn_like(got)
    (got * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(one.grad, other.grad)


def test_max_logprobs_gradient_agrees_with_finite_differences():
    torch.manual_seed(0)
    logits = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: get_max_logprobs(z, 2, 0.7), logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_max_logprobs_of_half_precision_are_normalized_in_float32(dtype):
    torch.manual_seed(0)
    logits = torch.randn(2, 4, 50).to(dtype)
    got = get_max_logprobs(logits, 2)
    assert got.dtype == torch.float32
    expected = logits.double().log_softmax(-1)[:, 1:-1].amax(-1)
    torch.testing.assert_close(got.double(), expected, atol=1e-6, rtol=0)


def test_max_logprobs_of_extreme_filtered_and_equal_logits():
    logits = tensor([[[3e38, -3e38], [-math.inf, 5.0], [0.0, 0.0], [0.0, 0.0]]])
    assert get_max_logprobs(logits)[0].tolist() == [0.0, 0.0, pytest.approx(-math.log(2))]
    assert get_max_logprobs(torch.zeros(1, 2, 4), 1).tolist() == [[pytest.approx(-math.log(4))]]


def test_generated_values_slice_the_sequence_axis_not_the_batch_axis():
    # prefix 3 of 5: the states before the generated tokens 0 and 1 stand at positions 2 and 3;
    # the seed's values[prefix_len-1:-1] cuts rows and keeps all 5 positions
    values = tensor([[0.0, 1.0, 2.0, 3.0, 4.0], [10.0, 11.0, 12.0, 13.0, 14.0]])
    assert generated_values(values, 3).tolist() == [[2.0, 3.0], [12.0, 13.0]]


def test_generated_logits_are_those_the_tokens_were_drawn_from():
    logits = torch.arange(2 * 4 * 3, dtype=torch.float32).reshape(2, 4, 3)
    # prefix 3 of 4: one generated token, whose logits stand at position 2
    assert generated_logits(logits, 3).tolist() == [[[6.0, 7.0, 8.0]], [[18.0, 19.0, 20.0]]]


@given(st.integers(2, 7), st.data())
@settings(max_examples=20, deadline=None)
def test_values_and_logits_follow_the_position_rule(seq, data):
    prefix_len = data.draw(st.integers(1, seq - 1))
    values = torch.arange(seq, dtype=torch.float64)[None].requires_grad_()
    expected = [float(prefix_len - 1 + t) for t in range(seq - prefix_len)]
    assert generated_values(values, prefix_len)[0].tolist() == expected
    assert generated_logits(values[..., None], prefix_len)[0, :, 0].tolist() == expected
    assert torch.autograd.gradcheck(lambda v: generated_values(v, prefix_len), values)


def test_log_probs_and_token_logprobs_match_hand_computed():
    # (1/4, 3/4), and sqrt 3 / (1 + sqrt 3) for token 1 at temperature 2
    logits, tokens = tensor([[[0.0, LOG3], [LOG3, 0.0]]]), tensor([[1, 1]])
    logprobs = log_probs(logits)
    expected = [math.log(1 / 4), math.log(3 / 4)]
    assert logprobs[0].tolist() == [pytest.approx(expected), pytest.approx(expected[::-1])]
    assert token_logprobs(logprobs, tokens)[0].tolist() == pytest.approx(expected[::-1])
    warm = log_probs(logits, temperature=2.0)[0, 0, 1].item()
    assert warm == pytest.approx(math.log(math.sqrt(3) / (1 + math.sqrt(3))))


@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 6), st.integers(0, 1000), st.data())
@settings(max_examples=30, deadline=None)
def test_token_logprobs_match_torch_distributions(batch, gen, d_vocab, seed, data):
    temperature = data.draw(st.sampled_from([0.5, 1.0, 1.7]))
    torch.manual_seed(seed)
    logits = torch.randn(batch, gen, d_vocab, dtype=torch.float64) * 3
    tokens = torch.randint(0, d_vocab, (batch, gen))
    logprobs = log_probs(logits, temperature)
    torch.testing.assert_close(logprobs.exp().sum(-1), torch.ones(batch, gen).double())
    got = token_logprobs(logprobs, tokens)
    assert got.shape == (batch, gen)
    torch.testing.assert_close(got, Categorical(logits=logits / temperature).log_prob(tokens))
    one_more = torch.cat([logits, logits[:, :1]], 1), torch.cat([tokens[:, :1], tokens], 1)
    torch.testing.assert_close(got, get_logprobs(*one_more, 1, temperature))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_log_probs_are_in_float32_at_least(dtype):
    logits = torch.randn(2, 4, 50).to(dtype)
    got = log_probs(logits, 0.7)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = (logits.double() / 0.7).log_softmax(-1)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=0)


def test_log_probs_are_finite_unless_a_logit_is_nan():
    rows = [[0.0, 0.0, -INF], [-INF, -INF, -INF], [INF, 0.0, 1.0], [3e38, -3e38, 0.0]]
    logits = tensor([rows], requires_grad=True)
    logprobs = log_probs(logits)
    assert logprobs.isfinite().all() and (logprobs.detach() <= 0).all()
    assert logprobs[0, 0].tolist() == pytest.approx([math.log(1 / 2)] * 2 + [LOG_ZERO])
    assert logprobs.exp()[0, 0, 2] == 0
    (logprobs.exp() * torch.randn(1, 4, 3)).sum().backward()
    assert logits.grad.isfinite().all() and logits.grad[0, 0, 2] == 0
    assert log_probs(tensor([[[0.0, NAN]]])).isnan().all()


def test_log_probs_gradients_agree_with_finite_differences():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 4, dtype=torch.float64)
    tokens, check = torch.randint(0, 4, (2, 3)), torch.autograd.gradcheck
    for filtered in (logits, logits.index_fill(-1, tensor([1]), -INF)):
        leaf = filtered.clone().requires_grad_()
        assert check(lambda z: log_probs(z, 0.7).exp(), leaf)
        possible = tokens.masked_fill(tokens == 1, 0)
        assert check(lambda z, t=possible: token_logprobs(log_probs(z, 0.7), t), leaf)


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN])
def test_log_probs_raise_when_temperature_is_not_positive(temperature):
    with pytest.raises(ValueError, match="temperature must be greater than 0"):
        log_probs(torch.zeros(1, 2, 3), temperature)
