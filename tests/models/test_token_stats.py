"""Log-probability, entropy and KL in chunks of tokens, compared with the readable functions."""

from contextlib import nullcontext
from functools import cache, partial
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_lab.functional import entropy_per_token, kl_per_token, log_probs, token_logprobs
from rlhf_lab.models import token_stats, token_stats_chunked
from rlhf_lab.models.token_stats import chunk_sizes, fuses
from rlhf_lab.samples import Support

INF, NAN = float("inf"), float("nan")
RECOMPUTE, KEEP = 0, 2**40  # bytes kept for the backward pass
CASES = [(truncated, size) for truncated in (False, True) for size in (RECOMPUTE, KEEP)]
MODES = pytest.mark.parametrize("truncated, keep_bytes", CASES)


def randn(seed, *shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_inputs(seed, batch=4, gen=2, dtype=torch.float64, d_vocab=11, scale=1.0, d_model=5):
    """Hidden states, W_U and b_U."""
    shapes = (batch, gen, d_model), (d_model, d_vocab), (d_vocab,)
    return tuple(scale * randn(seed + i, *x, dtype=dtype) for i, x in enumerate(shapes))


def learnable(inputs):
    return tuple(x.clone().requires_grad_() for x in inputs)


def make_tokens(seed, batch=4, gen=2, d_vocab=11, width=4):
    """Tokens, and a support that contains each of them."""
    ids = randn(seed, batch, gen, d_vocab).argsort(-1)[..., :width]
    column = randn(seed + 1, batch, gen, width).argmax(-1, keepdim=True)
    kept = (randn(seed + 2, batch, gen, width) < 0.3).scatter(-1, column, True)
    return ids.gather(-1, column)[..., 0], Support(ids, kept)


def chunked(policy, tokens, *options):
    return token_stats_chunked(*policy, tokens, *options)


def readable(policy, tokens, temperature=1.0, support=None, reference=None, *sizes):
    models = (policy,) if reference is None else (policy, reference)
    log_p, *log_q = (log_probs(hidden @ W_U + b_U, temperature) for hidden, W_U, b_U in models)
    score = token_logprobs if support is None else support.token_logprobs
    return score(log_p, tokens), entropy_per_token(log_p), *(kl_per_token(log_p, q) for q in log_q)


def gradients(stats, inputs, seed=3):
    """Gradients of a random sum of the statistics."""
    loss = sum((x * randn(seed + i, *x.shape, dtype=x.dtype)).sum() for i, x in enumerate(stats))
    return torch.autograd.grad(loss, inputs, retain_graph=True)


def assert_close(actual, expected, rel):
    """Check that each tensor differs by at most `rel` of the largest entry of the expected one."""
    for a, b in zip(actual, expected, strict=True):
        atol = rel * b.double().masked_fill(b.isinf(), 0.0).abs().max().clamp(min=0.1).item()
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=atol)


def check(policy, *options, rel=1e-10):
    """Compare values and gradients, of all statistics and of each, with the readable functions."""
    results = []
    for function in (chunked, readable):
        inputs = learnable(policy)
        stats = [x for x in function(inputs, *options) if x is not None]
        grads = [grad for x in (stats, *([s] for s in stats)) for grad in gradients(x, inputs)]
        results.append(stats + grads)
    assert_close(*results, rel)
    return results[0]


def assert_equal(actual, expected):
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@given(
    shape=st.tuples(st.integers(0, 9999), st.integers(1, 3), st.integers(1, 3)),
    sizes=st.fixed_dictionaries({"d_vocab": st.integers(2, 30), "scale": st.floats(0.1, 4.0)}),
    temperature=st.one_of(st.just(1.0), st.floats(0.3, 3.0)),
    chunks=st.tuples(st.integers(1, 10), st.sampled_from([RECOMPUTE, KEEP])),
    has_reference=st.booleans(),
    is_outside=st.sampled_from([None, False, True]),
)
@pytest.mark.slow
def test_chunked_stats_match_the_readable_functions(
    shape, sizes, temperature, chunks, has_reference, is_outside
):
    tokens, support = make_tokens(*shape, sizes["d_vocab"], min(4, sizes["d_vocab"]))
    if is_outside:
        support.kept[0] &= support.tokens[0] != tokens[0, :, None]
    reference = make_inputs(shape[0] + 9, *shape[1:], **sizes, d_model=3) if has_reference else None
    options = temperature, None if is_outside is None else support, reference, *chunks
    check(make_inputs(*shape, **sizes), tokens, *options, rel=1e-8)


@pytest.mark.parametrize("n_models, missing", [(1, 0), (1, 1), (2, 0), (2, 1)])
def test_chunked_stats_never_make_a_tensor_of_all_logits(n_models, missing):
    sizes, saved = [], []

    class RecordSizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (result,) if isinstance(x, torch.Tensor))
            return result

    # 40 x 11 logits in float64; the largest tensors are chunks of 10 x 11 and a support of 40 x 4
    (tokens, support), policy = make_tokens(2, 40, 1), learnable(make_inputs(0, 40, 1, d_model=2))
    reference = None if n_models == 1 else make_inputs(9, 40, 1, d_model=2)
    options = 1.0, support, reference, 10, n_models * 40 * 11 * 8 - missing
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x)
    with RecordSizes(), hooks:
        gradients(chunked(policy, tokens, *options)[: 1 + n_models], policy)
    assert max(sizes) == 40 * 4
    assert any(x.shape == (10, 1, 11) for x in saved) == (not missing)


@MODES
@pytest.mark.parametrize("name, rel", [("float32", 1e-5), ("bfloat16", 2**-6), ("float16", 2**-9)])
def test_stats_match_float64_within_rounding(name, rel, truncated, keep_bytes):
    # half precision: 4 units in the last place (2^-8 and 2^-11) of the largest entry
    dtype, (tokens, support) = getattr(torch, name), make_tokens(2)
    models = [make_inputs(seed, dtype=dtype) for seed in (0, 9)]
    exact, exact_reference = (tuple(x.double() for x in model) for model in models)
    policy, exact, support = learnable(models[0]), learnable(exact), support if truncated else None
    stats = chunked(policy, tokens, 0.8, support, models[1], 3, keep_bytes)
    expected = readable(exact, tokens, 0.8, support, exact_reference)
    assert_close(stats, expected, rel)
    assert_close(gradients(stats, policy), gradients(expected, exact), rel)
    kl = chunked(policy, tokens, 0.7, support, models[0]).kl
    assert_equal((*stats, kl), (*(x.float() for x in stats), torch.zeros(4, 2)))


@pytest.mark.parametrize("bias, ref_bias", [(-INF, 0.5), (-INF, -INF), (-1e4, -INF), (0.5, -INF)])
def test_impossible_words_match_the_readable_functions(bias, ref_bias):
    policy, reference = make_inputs(0), make_inputs(9)
    policy[2][3], reference[2][3] = bias, ref_bias
    tokens = torch.tensor([[1, 0], [5, 6], [7, 8], [9, 2]])
    _, entropy, kl, *grads = check(policy, tokens, 0.8, None, reference, 3)
    assert all(x.isfinite().all() for x in (entropy, *grads))
    assert (kl == INF).all() if bias == 0.5 else kl.isfinite().all()


@MODES
@pytest.mark.parametrize("value", [NAN, INF])
def test_masked_tokens_add_exactly_zero_even_if_nan(value, truncated, keep_bytes):
    (tokens, support), policy, grads = make_tokens(2), learnable(make_inputs(0)), []
    is_masked = torch.arange(4)[:, None] == 2
    options = 0.8, support if truncated else None, make_inputs(9), 3, keep_bytes
    for fill in (1.0, value):
        policy[0].data[2] = fill
        stats = chunked(policy, tokens, *options)
        grads.append(gradients([x.masked_fill(is_masked, 0.0) for x in stats], policy))
    assert_equal(*grads)
    assert (grads[1][0][2] == 0.0).all()
    assert value == INF or all(s[2].isnan().all() for s in stats)  # not hidden without a mask
    assert not gradients(stats, policy)[1].isfinite().any()


def test_no_value_is_read_back_from_the_device():
    # a fake tensor has no values: reading one, or indexing with a mask, raises
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=False):
        policy = learnable((torch.empty(4, 2, 5), torch.empty(5, 11), torch.empty(11)))
        ids = torch.zeros(4, 2, 3, dtype=torch.long)
        options = 0.8, Support(ids, ids == 0), tuple(x.detach() for x in policy), 3, RECOMPUTE
        stats = chunked(policy, ids[..., 0], *options)
        grads = torch.autograd.grad(sum(x.sum() for x in stats), policy)
    assert [g.shape for g in grads] == [x.shape for x in policy]


@pytest.mark.slow
def test_compiled_functions_change_no_result(monkeypatch):
    """The same operations, traced by torch.compile; on CUDA, Triton fuses them."""
    (tokens, support), compile_function = make_tokens(2), torch.compile
    wrong = lambda function, n_rows=9: (
        lambda *inputs: [x * (1 + (len(inputs[0][0]) < n_rows)) for x in function(*inputs)]
    )
    for compiler, problem in (
        (partial(compile_function, backend="aot_eager"), None),
        (wrong, "differ from those without it"),
        (partial(wrong, n_rows=3), "differ from those"),  # for the last 2 of 8 tokens only
        (lambda function: Mock(side_effect=RuntimeError), "it failed with RuntimeError"),
    ):
        monkeypatch.setattr(token_stats, "fuses", lambda *sizes: True)
        monkeypatch.setattr(token_stats, "fused", cache(token_stats.fused.__wrapped__))
        monkeypatch.setattr(torch, "compile", compiler)
        with pytest.warns(UserWarning, match=problem) if problem else nullcontext():
            check(make_inputs(0), tokens, 0.8, None, None, 3, RECOMPUTE)
            check(make_inputs(0), tokens, 0.8, support, make_inputs(9), 3, KEEP)
    assert not fuses(torch.device("cpu"), 2**40) and not fuses(torch.device("cuda"), 2**26)


def test_chunk_sizes_depend_on_the_device_only():
    assert chunk_sizes(50257, None) == (256, 2**29) and chunk_sizes(2048, None) == (2048, 2**29)
    assert chunk_sizes(50257, 80 * 2**30) == (80 * 2**20 // 50257, 5 * 2**30)
