"""Log-probs, entropy and KL by chunks of rows, against the readable functions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor
from torch.nn.functional import pad

from rlhf_lab.functional import entropy_per_token, get_logprobs, kl_per_token, log_probs
from rlhf_lab.models.fast import Readout, token_stats_chunked

INF, NAN = float("inf"), float("nan")
ROWS, D_MODEL, D_VOCAB = 7, 5, 11
ALWAYS_RECOMPUTE, ALWAYS_KEEP = 0, 2**40


def readout(seed, rows=ROWS, dtype=torch.float64, d_model=D_MODEL, d_vocab=D_VOCAB, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, d_model), (d_model, d_vocab), (d_vocab,)]
    parts = [torch.randn(s, generator=generator, dtype=torch.float64) * scale for s in shapes]
    return Readout(*(x.to(dtype) for x in parts))


def learnable(fixed):
    return Readout(
        *(
            None if x is None else x.clone().requires_grad_()
            for x in (fixed.hidden, fixed.W_U, fixed.b_U)
        )
    )


def sampled(seed, rows=ROWS, d_vocab=D_VOCAB, width=4):
    """Tokens, and a support of distinct ids that keeps the sampled one and drops some others."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, d_vocab, generator=generator).argsort(-1)[:, :width]
    column = torch.randint(0, width, (rows, 1), generator=generator)
    kept = torch.rand(rows, width, generator=generator) < 0.6
    kept = kept.scatter(1, column, True)
    return ids.gather(1, column)[:, 0], (ids, kept)


def logits_of(part):
    bias = 0.0 if part.b_U is None else part.b_U
    return (part.hidden @ part.W_U + bias)[None]


def readable(policy, tokens, reference, temperature=1.0, support=None):
    """The same statistics out of whole logits, with one sequence that has every row."""
    logits = torch.cat([logits_of(policy), torch.zeros_like(logits_of(policy)[:, :1])], dim=1)
    scored = logits
    if support is not None:
        allowed = torch.zeros(logits_of(policy)[0].shape, dtype=torch.bool).scatter(1, *support)
        scored = logits.masked_fill(~pad(allowed, (0, 0, 0, 1), value=True), -INF)
    shifted = torch.cat([tokens[:1], tokens])[None]
    logprobs = get_logprobs(scored, shifted, 1, temperature)[0]
    every, kl = log_probs(logits_of(policy), temperature), None
    if reference is not None:
        kl = kl_per_token(every, log_probs(logits_of(reference), temperature))[0]
    return logprobs, entropy_per_token(every)[0], kl


def gradients(stats, policy, weights):
    """Of a random sum of the statistics, with respect to hidden, W_U and b_U."""
    loss = sum((s * w).sum() for s, w in zip(stats, weights, strict=True) if s is not None)
    learned = [x for x in (policy.hidden, policy.W_U, policy.b_U) if x is not None]
    return torch.autograd.grad(loss, learned)


def upstream(seed, rows=ROWS, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, rows, generator=generator, dtype=torch.float64).to(dtype)


def assert_close_in_norm(got, expected, rel):
    """Each tensor differs by at most `rel` of the largest entry of the expected one."""
    for a, b in zip(got, expected, strict=True):
        assert (a.double() - b.double()).abs().max() <= rel * b.double().abs().max()


def test_two_words_by_hand():
    # logits of the policy (log 3, 0), p = (3/4, 1/4); of the reference (0, 0), q = (1/2, 1/2)
    # H = 3/4 log 4/3 + 1/4 log 4;  KL = 3/4 log 3/2 + 1/4 log 1/2
    z = tensor([[math.log(3), 0.0]], dtype=torch.float64)
    policy = learnable(Readout(torch.ones(1, 1).double(), z))
    stats = token_stats_chunked(policy, tensor([1]), Readout(policy.hidden.detach(), 0 * z))
    h = 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    kl = 0.75 * math.log(3 / 2) + 0.25 * math.log(1 / 2)
    assert stats.logprobs.item() == pytest.approx(math.log(1 / 4))
    assert stats.entropy.item() == pytest.approx(h)
    assert stats.kl.item() == pytest.approx(kl)
    # d log p(1)/dz = (0, 1) - (3/4, 1/4); dH/dz_0 = -3/4 (log 3/4 + H); dKL/dz_0 = 3/4 (log 3/2 -
    # KL); the second entries are the first with the other sign, since each row sums to 0
    expected = [-0.75, -0.75 * (math.log(3 / 4) + h), 0.75 * (math.log(3 / 2) - kl)]
    for stat, slope in zip(stats, expected, strict=True):
        (grad,) = torch.autograd.grad(stat.sum(), policy.W_U, retain_graph=True)
        torch.testing.assert_close(grad, tensor([[slope, -slope]], dtype=torch.float64))


def test_support_of_two_out_of_three_words_by_hand():
    # p = (1/2, 1/4, 1/4); within {0, 2} the third word has 1/3; d/dz = (-2/3, 0, 2/3)
    z = tensor([[math.log(2), 0.0, 0.0]], dtype=torch.float64)
    policy = learnable(Readout(torch.ones(1, 1).double(), z))
    support = (tensor([[2, 0, 1]]), tensor([[True, True, False]]))
    stats = token_stats_chunked(policy, tensor([2]), support=support)
    assert stats.kl is None
    assert stats.logprobs.item() == pytest.approx(math.log(1 / 3))
    assert stats.entropy.item() == pytest.approx(1.5 * math.log(2))
    (grad,) = torch.autograd.grad(stats.logprobs.sum(), policy.W_U)
    torch.testing.assert_close(grad, tensor([[-2 / 3, 0.0, 2 / 3]], dtype=torch.float64))
    outside = token_stats_chunked(policy, tensor([1]), support=support)
    assert outside.logprobs.item() == -INF
    # minus the softmax within the support, and nothing at the word that was not kept
    (grad,) = torch.autograd.grad(outside.logprobs.sum(), policy.W_U)
    torch.testing.assert_close(grad, tensor([[-2 / 3, 0.0, -1 / 3]], dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("keep_bytes", [ALWAYS_RECOMPUTE, ALWAYS_KEEP])
@pytest.mark.parametrize("chunk_rows", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("dtype, rel", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_values_and_gradients_are_the_readable_ones(
    dtype, rel, truncated, temperature, chunk_rows, keep_bytes
):
    policy, reference = learnable(readout(0, dtype=dtype)), readout(1, dtype=dtype)
    tokens, support = sampled(2)
    support = support if truncated else None
    fast = token_stats_chunked(
        policy, tokens, reference, temperature, support, chunk_rows, keep_bytes
    )
    slow = readable(policy, tokens, reference, temperature, support)
    assert_close_in_norm(fast, slow, rel)
    weights = upstream(3, dtype=dtype)
    assert_close_in_norm(gradients(fast, policy, weights), gradients(slow, policy, weights), rel)


@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 6),
    d_vocab=st.integers(2, 30),
    scale=st.floats(0.1, 4.0),
    temperature=st.floats(0.3, 3.0),
    chunk_rows=st.integers(1, 8),
)
@settings(max_examples=40, deadline=None)
def test_any_shape_scale_temperature_and_chunk(seed, rows, d_vocab, scale, temperature, chunk_rows):
    policy = learnable(readout(seed, rows, d_vocab=d_vocab, scale=scale))
    reference = readout(seed + 1, rows, d_vocab=d_vocab, scale=scale, d_model=3)
    tokens, support = sampled(seed, rows, d_vocab, width=min(4, d_vocab))
    fast = token_stats_chunked(policy, tokens, reference, temperature, support, chunk_rows)
    slow = readable(policy, tokens, reference, temperature, support)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    weights = upstream(seed, rows)
    pairs = zip(gradients(fast, policy, weights), gradients(slow, policy, weights), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("keep_bytes", [ALWAYS_RECOMPUTE, ALWAYS_KEEP])
@pytest.mark.parametrize("truncated", [False, True])
def test_gradients_agree_with_finite_differences(truncated, keep_bytes):
    policy, reference = learnable(readout(0, rows=3, d_vocab=5)), readout(1, rows=3, d_vocab=5)
    tokens, support = sampled(2, rows=3, d_vocab=5, width=3)

    def stats(hidden, W_U, b_U):
        part = Readout(hidden, W_U, b_U)
        support_or_none = support if truncated else None
        return tuple(
            token_stats_chunked(part, tokens, reference, 0.7, support_or_none, 2, keep_bytes)
        )

    assert torch.autograd.gradcheck(stats, (policy.hidden, policy.W_U, policy.b_U))


def test_kept_and_recomputed_passes_agree_to_the_bit():
    tokens, support = sampled(2)
    results = []
    for keep_bytes in (ALWAYS_RECOMPUTE, ALWAYS_KEEP):
        policy = learnable(readout(0, dtype=torch.float32))
        stats = token_stats_chunked(
            policy, tokens, readout(1, dtype=torch.float32), 0.9, support, 3, keep_bytes
        )
        results.append([*stats, *gradients(stats, policy, upstream(3, dtype=torch.float32))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_second_backward_through_the_kept_buffers_gives_the_same():
    policy, (tokens, support) = learnable(readout(0)), sampled(2)
    stats = token_stats_chunked(policy, tokens, readout(1), support=support)
    loss = sum((s * w).sum() for s, w in zip(stats, upstream(3), strict=True))
    first, second = (torch.autograd.grad(loss, policy.W_U, retain_graph=True)[0] for _ in "ab")
    assert torch.equal(first, second)


def saved_sizes(keep_bytes, with_reference=True):
    policy, (tokens, support) = learnable(readout(0, rows=20)), sampled(2, rows=20)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: sizes.append(x.numel()) or x, lambda x: x
    ):
        reference = readout(1, rows=20) if with_reference else None
        token_stats_chunked(policy, tokens, reference, 1.0, support, 3, keep_bytes)
    return sizes


def test_nothing_as_large_as_all_logits_is_saved_beyond_keep_bytes():
    # 20 rows of 11 words in float64: 1760 bytes for log p, as much again for log p - log q
    assert saved_sizes(3519).count(220) == 0 and max(saved_sizes(3519)) < 220
    assert saved_sizes(3520).count(220) == 2
    assert saved_sizes(1760, with_reference=False).count(220) == 1
    assert saved_sizes(1759, with_reference=False).count(220) == 0


def test_no_tensor_as_large_as_all_logits_is_made_when_recomputing():
    made = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            made.extend(x.numel() for x in (result,) if isinstance(x, torch.Tensor))
            return result

    # 40 rows of 11 words are 440 numbers; the largest that is needed is a chunk of 10, 110
    policy, (tokens, support) = learnable(readout(0, rows=40, d_model=2)), sampled(2, rows=40)
    with Watch():
        stats = token_stats_chunked(
            policy, tokens, readout(1, rows=40, d_model=2), 1.0, support, 10, ALWAYS_RECOMPUTE
        )
        gradients(stats, policy, upstream(3, rows=40))
    support_entries = support[0].numel()
    assert max(made) <= max(110, support_entries, 2 * 40 * 2)


def test_only_the_gradients_that_are_needed_are_computed():
    fixed, (tokens, _) = readout(0), sampled(2)
    hidden = fixed.hidden.clone().requires_grad_()
    stats = token_stats_chunked(Readout(hidden, fixed.W_U, fixed.b_U), tokens, readout(1))
    full = learnable(fixed)
    expected = gradients(token_stats_chunked(full, tokens, readout(1)), full, upstream(3))[0]
    loss = sum((s * w).sum() for s, w in zip(stats, upstream(3), strict=True))
    assert torch.equal(torch.autograd.grad(loss, hidden)[0], expected)
    assert not token_stats_chunked(fixed, tokens, full).kl.requires_grad


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("truncated", [False, True])
def test_each_statistic_alone_has_its_own_gradient(which, truncated):
    policy, reference, (tokens, support) = learnable(readout(0)), readout(1), sampled(2)
    support = support if truncated else None
    weights = upstream(3)[which]
    got, expected = (
        torch.autograd.grad((f(policy, tokens, reference, 0.8, support)[which] * weights).sum(), x)
        for f in (token_stats_chunked, readable)
        for x in [(policy.hidden, policy.W_U, policy.b_U)]
    )
    assert_close_in_norm(got, expected, 1e-10)


@pytest.mark.parametrize("truncated", [False, True])
def test_without_a_reference_or_a_bias(truncated):
    policy, (tokens, support) = readout(0), sampled(2)
    support = support if truncated else None
    policy = learnable(Readout(policy.hidden, policy.W_U))
    fast = token_stats_chunked(policy, tokens, None, 0.8, support, 3)
    slow = readable(policy, tokens, None, 0.8, support)
    assert fast.kl is None
    assert_close_in_norm(fast[:2], slow[:2], 1e-10)
    weights = upstream(3)
    assert_close_in_norm(gradients(fast, policy, weights), gradients(slow, policy, weights), 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_identical_models_have_a_kl_of_exactly_zero(dtype):
    policy, (tokens, _) = readout(0, dtype=dtype, scale=3.0), sampled(2)
    kl = token_stats_chunked(policy, tokens, policy, 0.7).kl
    assert (kl == 0.0).all() and kl.dtype == torch.float32


@pytest.mark.parametrize("dtype, rel", [(torch.bfloat16, 2**-6), (torch.float16, 2**-9)])
@pytest.mark.parametrize("keep_bytes", [ALWAYS_RECOMPUTE, ALWAYS_KEEP])
def test_half_precision_is_float64_on_the_same_numbers_within_its_rounding(dtype, rel, keep_bytes):
    # the tolerance is 4 units of the last place (2^-8 and 2^-11) of the largest entry
    policy, reference = learnable(readout(0, dtype=dtype)), readout(1, dtype=dtype)
    tokens, support = sampled(2)
    fast = token_stats_chunked(policy, tokens, reference, 0.8, support, 3, keep_bytes)
    exact = learnable(Readout(*(x.detach().double() for x in vars(policy).values())))
    exact_reference = Readout(*(x.double() for x in vars(reference).values()))
    slow = readable(exact, tokens, exact_reference, 0.8, support)
    assert all(x.dtype == torch.float32 for x in fast)
    assert_close_in_norm(fast, slow, rel)
    got = gradients(fast, policy, upstream(3, dtype=torch.float32))
    assert all(x.dtype == dtype for x in got)
    assert_close_in_norm(got, gradients(slow, exact, upstream(3)), rel)


def test_words_filtered_by_the_bias_count_as_zero_on_both_sides():
    policy, reference, (tokens, _) = readout(0), readout(1), sampled(2)
    filtered = (tokens[0] + 1) % D_VOCAB
    tokens = torch.where(tokens == filtered, tokens[0], tokens)
    policy.b_U[filtered] = -INF
    for bias in (reference.b_U[filtered].item(), -INF):
        reference.b_U[filtered] = bias
        learned = learnable(policy)
        fast = token_stats_chunked(learned, tokens, reference, 0.8, None, 3)
        slow = readable(learned, tokens, reference, 0.8)
        assert_close_in_norm(fast, slow, 1e-10)
        got, expected = (gradients(x, learned, upstream(3)) for x in (fast, slow))
        assert_close_in_norm(got, expected, 1e-10)
        assert got[2][filtered] == 0.0
    said = torch.full_like(tokens, filtered)
    assert (token_stats_chunked(policy, said).logprobs == -INF).all()


def test_a_word_that_the_reference_cannot_say_makes_the_kl_inf():
    policy, reference, (tokens, _) = readout(0), readout(1), sampled(2)
    reference.b_U[3] = -INF
    stats = token_stats_chunked(policy, tokens, reference)
    assert (stats.kl == INF).all() and stats.entropy.isfinite().all()
    # unless the policy's probability of it underflows to 0
    policy.b_U[3] = -1e4
    assert token_stats_chunked(policy, tokens, reference).kl.isfinite().all()


def test_logits_of_plus_and_minus_ten_thousand_stay_finite():
    z = tensor([[1e4, 0.0, -1e4], [-1e4, -1e4, 1e4]])
    policy = learnable(Readout(torch.eye(2), z))
    reference = Readout(torch.eye(2), torch.zeros(2, 3))
    stats = token_stats_chunked(policy, tensor([0, 0]), reference)
    # the first row says word 0, the second word 2: no entropy, KL log 3 from the uniform one
    assert stats.logprobs.tolist() == [0.0, -2e4]
    assert stats.entropy.tolist() == [0.0, 0.0]
    assert stats.kl.tolist() == pytest.approx([math.log(3)] * 2)
    for weights in (tensor([[1.0, 1.0]] * 3), tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])):
        loss = sum((s * w).sum() for s, w in zip(stats, weights, strict=True))
        grads = torch.autograd.grad(loss, (policy.hidden, policy.W_U), retain_graph=True)
        assert all(g.isfinite().all() for g in grads)
    (grad,) = torch.autograd.grad(stats.logprobs.sum(), policy.W_U)
    assert grad.tolist() == [[0.0, 0.0, 0.0], [1.0, 0.0, -1.0]]


@pytest.mark.parametrize("keep_bytes", [ALWAYS_RECOMPUTE, ALWAYS_KEEP])
@pytest.mark.parametrize("poison", [NAN, INF])
def test_a_row_without_upstream_gradient_adds_exactly_zero_even_if_it_holds_nan(poison, keep_bytes):
    clean, reference, (tokens, support) = readout(0), readout(1), sampled(2)
    weights = upstream(3)
    weights[:, 4] = 0.0
    poisoned = readout(0)
    poisoned.hidden[4] = poison
    grads = []
    for part in (learnable(clean), learnable(poisoned)):
        stats = token_stats_chunked(part, tokens, reference, 0.8, support, 3, keep_bytes)
        others = [s.masked_fill(torch.arange(ROWS) == 4, 0.0) for s in stats]
        grads.append(gradients(others, part, weights))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert (grads[0][0][4] == 0.0).all()


def test_nan_in_a_row_that_counts_is_not_hidden():
    policy, (tokens, _) = readout(0), sampled(2)
    policy.hidden[4] = NAN
    policy = learnable(policy)
    stats = token_stats_chunked(policy, tokens, readout(1))
    for stat in stats:
        assert stat.isnan().tolist() == [row == 4 for row in range(ROWS)]
    assert all(g.isnan().any() for g in gradients(stats, policy, upstream(3)))


def test_no_value_is_read_back_so_that_a_gpu_never_waits():
    # a fake tensor has no values: to ask for one, or to index with a boolean mask, raises
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=False):
        policy, reference = (
            Readout(torch.empty(ROWS, D_MODEL), torch.empty(D_MODEL, D_VOCAB), torch.empty(D_VOCAB))
            for _ in "pr"
        )
        policy = learnable(policy)
        ids = torch.zeros(ROWS, 4, dtype=torch.long)
        stats = token_stats_chunked(
            policy, ids[:, 0], reference, 0.8, (ids, ids == 0), 3, ALWAYS_RECOMPUTE
        )
        grads = gradients(stats, policy, torch.empty(3, ROWS))
    assert [g.shape for g in grads] == [(ROWS, D_MODEL), (D_MODEL, D_VOCAB), (D_VOCAB,)]


def test_no_rows_give_empty_statistics_and_zero_gradients():
    policy = learnable(readout(0, rows=0))
    stats = token_stats_chunked(policy, torch.zeros(0).long(), readout(1, rows=0))
    assert all(len(s) == 0 for s in stats)
    assert all((g == 0.0).all() for g in gradients(stats, policy, upstream(3, rows=0)))


def test_arguments_stay_as_they_were():
    parts, (tokens, support) = (readout(0), readout(1)), sampled(2)
    before = [x.clone() for part in parts for x in vars(part).values()]
    policy = learnable(parts[0])
    stats = token_stats_chunked(policy, tokens, parts[1], 0.8, support, 3)
    gradients(stats, policy, upstream(3))
    after = [x for part in (policy, parts[1]) for x in vars(part).values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_what_does_not_fit_is_refused():
    policy, (tokens, _) = readout(0), sampled(2)
    with pytest.raises(ValueError, match="temperature is 0.0"):
        token_stats_chunked(policy, tokens, temperature=0.0)
    with pytest.raises(ValueError, match="chunk_rows is 0"):
        token_stats_chunked(policy, tokens, chunk_rows=0)
    with pytest.raises(ValueError, match=r"reference.W_U has shape \(5, 12\) .* \(5, 11\)"):
        token_stats_chunked(policy, tokens, readout(1, d_vocab=12))
    with pytest.raises(ValueError, match=r"policy.hidden has shape \(8, 5\)"):
        token_stats_chunked(readout(0, rows=8), tokens)
    with pytest.raises(ValueError, match="reference.hidden has dtype torch.float32"):
        token_stats_chunked(policy, tokens, readout(1, dtype=torch.float32))
