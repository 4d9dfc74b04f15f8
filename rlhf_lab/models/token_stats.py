"""Log-probability, entropy and exact KL of generated tokens, in chunks for many logits."""

import warnings
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves

from rlhf_lab.functional import LOG_ZERO, entropy_per_token, kl_per_token, log_probs, token_logprobs
from rlhf_lab.functional.kl import MAX_KL
from rlhf_lab.models.device import autocast, total_memory
from rlhf_lab.models.hooked_model import (
    HookedModel,
    Residuals,
    is_plain_unembed,
    unembed,
    unembed_residuals,
)
from rlhf_lab.models.hooked_transformer import linear, pad_vocabulary, pads_vocabulary
from rlhf_lab.samples import Support

MAX_LOGITS = 2**23  # that are computed at once; more are computed in chunks of tokens
MIN_ROWS, LOGITS_AT_ONCE = 256, 2**22  # tokens and logits per chunk on the CPU, at least
BYTES_KEPT = 2**29  # of log-probabilities stored for the backward pass on the CPU
FUSED_LOGITS = 2**27  # per minibatch, from which on CUDA uses torch.compile
MAX_COMPILED_GAP = 1e-3  # relative difference of compiled results
Inputs = tuple[Tensor, Tensor, Tensor]  # hidden states, W_U and b_U
PerToken, Generated = Float[Tensor, "batch gen"], Int[Tensor, "batch gen"]
GenResiduals, GenLogits = Float[Tensor, "batch gen d_model"], Float[Tensor, "batch gen d_vocab"]


class TokenStats(NamedTuple):
    """Statistics of each generated token, in nats."""

    logprobs: PerToken  # renormalized over the support if there is one
    entropy: PerToken  # of the policy, over the whole vocabulary
    kl: PerToken | None  # KL(policy || reference), over the whole vocabulary


class StatsInputs(NamedTuple):
    """Inputs of a token's statistics other than its logits."""

    temperature: float
    support: Support | None = None  # tokens that truncated sampling kept
    reference: HookedModel | None = None
    ref_residuals: GenResiduals | None = None
    dtype: torch.dtype | None = None  # of the matrix products; that of the weights if None


def compute_token_stats(
    model: HookedModel, hidden: Residuals, tokens: Generated, inputs: StatsInputs
) -> TokenStats:
    """Compute the statistics of each generated token from its final normalized residual."""
    reference, dtype = inputs.reference, inputs.dtype
    models = [model] if reference is None else [model, reference]
    is_small = tokens.numel() * model.cfg.d_vocab <= MAX_LOGITS
    if is_small or not all(map(is_plain_unembed, models)):
        with autocast(hidden.device, dtype):
            logits = unembed(model, hidden)
        return stats_from_logits(logits, tokens, inputs)
    states = [hidden] if reference is None else [hidden, reference.ln_final(inputs.ref_residuals)]
    chunked, *ref = (
        tuple(x.to(dtype or m.unembed.W_U.dtype) for x in (state, m.unembed.W_U, m.unembed.b_U))
        for state, m in zip(states, models, strict=True)
    )
    if pads_vocabulary(hidden.device, tokens.numel(), model.cfg.d_vocab):
        chunked, *ref = ((x, *pad_vocabulary(W_U, b_U)) for x, W_U, b_U in (chunked, *ref))
    options = inputs.temperature, inputs.support, *(ref or [None])
    sizes = chunk_sizes(model.cfg.d_vocab, total_memory(hidden.device))
    return token_stats_chunked(*chunked, tokens, *options, *sizes)


def stats_from_logits(logits: GenLogits, tokens: Generated, inputs: StatsInputs) -> TokenStats:
    all_logprobs, kl = log_probs(logits, inputs.temperature), None
    if inputs.reference is not None:
        ref_logits = unembed_residuals(inputs.reference, inputs.ref_residuals, inputs.dtype)
        kl = kl_per_token(all_logprobs, log_probs(ref_logits, inputs.temperature))
    sampled = sampled_logprobs(all_logprobs, tokens, inputs.support)
    return TokenStats(sampled, entropy_per_token(all_logprobs), kl)


def sampled_logprobs(logprobs: GenLogits, tokens: Generated, support: Support | None) -> PerToken:
    """Select the log-probability of each token, renormalized over the support."""
    select = token_logprobs if support is None else support.token_logprobs
    return select(logprobs, tokens)


def chunk_sizes(d_vocab: int, memory: int | None) -> tuple[int, int]:
    """Return the tokens per chunk and the bytes that may be stored for the backward pass."""
    # fractions of a GPU's total memory, not of the free memory: the same seed gives the same run
    n_logits = max(LOGITS_AT_ONCE, (memory or 0) // 256 // 4)
    return max(MIN_ROWS, n_logits // d_vocab), max(BYTES_KEPT, (memory or 0) // 16)


def token_stats_chunked(
    hidden: GenResiduals,
    W_U: Float[Tensor, "d_model d_vocab"],
    b_U: Float[Tensor, " d_vocab"],
    tokens: Generated,
    temperature: float = 1.0,
    support: Support | None = None,
    reference: Inputs | None = None,
    chunk_rows: int = MIN_ROWS,
    keep_bytes: int = BYTES_KEPT,
) -> TokenStats:
    """Compute log-probability, entropy and exact KL of each token, `chunk_rows` tokens at a time.

    The log-probabilities of the whole vocabulary are kept for the backward pass if they fit into
    `keep_bytes`, else recomputed. Half-precision inputs give float32 results. A token whose
    upstream gradients are all 0 adds exactly 0 to all gradients, even if its hidden state is nan.

    Args:
        hidden: final normalized residuals at the states before the tokens.
        reference: hidden states, W_U and b_U of the reference, which gets no gradient.
    """
    flatten = lambda x: x.flatten(0, 1)[:, None]  # every token becomes a sequence of length 1
    references = [] if reference is None else [(flatten(reference[0]), *reference[1:])]
    support = [] if support is None else [flatten(support.tokens), flatten(support.kept)]
    n_logits = tokens.numel() * W_U.shape[1]
    is_fused = fuses(hidden.device, n_logits)
    n_bytes = n_logits * max(1 if is_fused else 4, W_U.element_size()) * (1 + len(references))
    keep = torch.is_grad_enabled() and n_bytes <= keep_bytes
    constants = references, flatten(tokens), temperature, support, chunk_rows, keep, is_fused
    stats = ChunkedStats.apply(flatten(hidden), W_U, b_U, *constants)
    logprobs, entropy, kl = (x.view(tokens.shape) for x in stats)
    kl = None if reference is None else kl.masked_fill(kl > MAX_KL, torch.inf)
    return TokenStats(logprobs, entropy, kl)


class ChunkedStats(torch.autograd.Function):
    """`token_stats_chunked` with its gradient in the logits z, here at temperature 1.

    d log p(a)/dz = [a] - p,   dH/dz = -p (log p + H),   dKL/dz = p (log p - log q - KL)
    """

    @staticmethod
    def forward(
        ctx, hidden, W_U, b_U, references, tokens, temperature, support, chunk_rows, keep, is_fused
    ):
        """Compute the statistics chunk by chunk."""
        ctx.chunks = [slice(i, i + chunk_rows) for i in range(0, max(1, len(tokens)), chunk_rows)]
        ctx.constants, stats, kept = (references, tokens, temperature, support, is_fused), [], []
        compute = fused(chunk_stats) if is_fused else chunk_stats
        for rows in ctx.chunks:
            inputs = tokens[rows], [x[rows] for x in support]
            values = chunk_values([(hidden, W_U, b_U), *references], rows, temperature, is_fused)
            stats.append(compute(values, temperature if is_fused else None, *inputs))
            kept += values if keep else []
            del values  # free the memory before the next chunk
        stats = [torch.cat(chunks) for chunks in zip(*stats, strict=True)]
        ctx.save_for_backward(hidden, W_U, b_U, *stats, *kept)
        return tuple(stats)

    @staticmethod
    @once_differentiable
    def backward(ctx, *upstream):
        """Compute the gradient of each chunk's logits, then that of the inputs."""
        hidden, W_U, b_U, logprobs, entropy, kl, *kept = ctx.saved_tensors
        references, tokens, temperature, support, is_fused = ctx.constants
        # gradient of z: p (constant - by_entropy log p + by_kl log p/q) + by_logprob [a]
        counts = torch.stack(upstream).ne(0).any(dim=0)[..., None]
        by_logprob, by_entropy, by_kl = (x[..., None] / temperature for x in upstream)
        by_logprob = by_logprob.masked_fill(logprobs[..., None].isinf(), 0.0)
        constant = -by_entropy * entropy[..., None] - by_kl * kl[..., None]
        constant = constant if support else constant - by_logprob
        factors = by_logprob, by_entropy, by_kl, constant, counts
        grad_hidden, grad_b = torch.empty_like(hidden), 0.0
        grad_W = torch.zeros_like(W_U) if ctx.needs_input_grad[1] else None
        compute = fused(chunk_gradient) if is_fused else chunk_gradient
        n_kept = len(kept) // len(ctx.chunks)
        for i, rows in enumerate(ctx.chunks):
            models = [(hidden, W_U, b_U), *references]
            values = kept[n_kept * i : n_kept * (i + 1)]
            values = values or chunk_values(models, rows, temperature, is_fused)
            inputs = tokens[rows], [x[rows] for x in support], [x[rows] for x in factors]
            grad, bias = compute(values, temperature if is_fused else None, *inputs)
            del values
            grad, grad_b = grad.to(W_U.dtype), grad_b + bias
            grad_hidden[rows, 0] = grad @ W_U.T
            if grad_W is not None:
                grad_W.addmm_(hidden[rows, 0].masked_fill(~counts[rows, 0], 0.0).T, grad)
        return grad_hidden, grad_W, grad_b, *(None,) * 7


def chunk_values(models: list[Inputs], rows: slice, temperature: float, is_fused: bool) -> list:
    """Compute the logits of one or two models, or `chunk_logprobs` of them."""
    logits = (linear(x[rows], W_U, b_U) for x, W_U, b_U in models)
    return list(logits) if is_fused else chunk_logprobs(logits, temperature)


def chunk_logprobs(logits: Iterable[Tensor], temperature: float) -> list[Tensor]:
    """Compute log p and log p - log q over the vocabulary; without a reference, q is 1."""
    log_p, *log_q = map(lambda x: log_probs(x, temperature), logits)  # frees them one by one
    return [log_p, torch.sub(log_p, *log_q, out=log_q[0]) if log_q else log_p]


def chunk_stats(
    values: list[Tensor], temperature: float | None, tokens: Generated, support: list[Tensor]
) -> tuple[Tensor, ...]:
    """Compute log-probability, entropy and KL, with one exp; the values are log-probs for None."""
    log_p, log_ratio = values if temperature is None else chunk_logprobs(values, temperature)
    logprobs = sampled_logprobs(log_p, tokens, Support(*support) if support else None)
    p = log_p.exp()
    return logprobs, -(p * log_p).sum(dim=-1), p.mul_(log_ratio).sum(dim=-1)


def chunk_gradient(
    values: list[Tensor], temperature: float | None, tokens: Generated, support: list, factors: list
) -> tuple[Tensor, ...]:
    """Compute the gradient of the logits, and its sum over all tokens (see `chunk_stats`)."""
    log_p, log_ratio = values if temperature is None else chunk_logprobs(values, temperature)
    by_logprob, by_entropy, by_kl, constant, counts = factors
    grad = torch.addcmul(constant, log_p, by_entropy, value=-1)
    grad.addcmul_(log_ratio, by_kl).mul_(log_p.exp())
    grad.scatter_add_(-1, tokens[..., None], by_logprob)
    if support:
        ids, is_kept = support
        inside = log_p.gather(-1, ids).masked_fill(~is_kept, LOG_ZERO)
        grad.scatter_add_(-1, ids, -by_logprob * inside.softmax(dim=-1))
    grad.masked_fill_(~counts, 0.0)
    return grad[:, 0].to(values[0].dtype), grad.sum(dim=(0, 1))


def fuses(device: torch.device, n_logits: int) -> bool:
    """Return True where one pass over the logits saves more than its compilation takes."""
    return device.type == "cuda" and n_logits >= FUSED_LOGITS


@cache
def fused(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Compile a function, unless that fails or, for the first inputs of a kind, results differ."""
    chosen, checked = torch.compile(function), set()

    def run(*inputs: Any) -> tuple[Tensor, ...]:
        nonlocal chosen
        kind = inputs[0][0].dtype, *(getattr(x, "shape", x) for x in tree_leaves(inputs))
        if chosen is not function and kind not in checked:  # torch.compile may compile again
            checked.add(kind)
            if problem := compilation_problem(chosen, inputs, function(*inputs)):
                chosen = function
                warnings.warn(f"torch.compile is not used for log-probs: {problem}.", stacklevel=2)
        return chosen(*inputs)

    return run


def compilation_problem(compiled: Callable, inputs: tuple, expected: tuple) -> str | None:
    try:
        pairs = list(zip(compiled(*inputs), expected, strict=True))
    except Exception as failure:  # without a compiler, for example
        return f"it failed with {type(failure).__name__}"
    for pair in pairs:
        found, exact = (x.float().nan_to_num(0.0, 0.0, 0.0) for x in pair)
        if not (found - exact).norm() <= MAX_COMPILED_GAP * exact.norm().clamp(min=0.01):
            return "its results differ from those without it"
    return None
