"""Log-probability, entropy and exact KL of generated tokens without a tensor of all logits."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_lab.functional import LOG_ZERO, log_probs, token_logprobs
from rlhf_lab.functional.kl import MAX_KL
from rlhf_lab.models.device import total_memory
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.models.hooked_transformer import linear
from rlhf_lab.samples import Support

MIN_ROWS, LOGITS_AT_ONCE = 256, 2**22  # tokens and logits per chunk on the CPU, at least
BYTES_KEPT = 2**29  # of log-probabilities stored for the backward pass on the CPU
Inputs = tuple[Tensor, Tensor, Tensor]  # hidden states, W_U and b_U


class TokenStats(NamedTuple):
    """Statistics of each generated token, in nats."""

    logprobs: Float[Tensor, "batch gen"]  # renormalized over the support if there is one
    entropy: Float[Tensor, "batch gen"]  # of the policy, over the whole vocabulary
    kl: Float[Tensor, "batch gen"] | None  # KL(policy || reference), over the whole vocabulary


def read_token_stats(
    model: HookedModel,
    hidden: Float[Tensor, "batch gen d_model"],
    tokens: Int[Tensor, "batch gen"],
    temperature: float,
    support: Support | None = None,
    reference: HookedModel | None = None,
    ref_hidden: Float[Tensor, "batch gen d_model"] | None = None,
    dtype: torch.dtype | None = None,
) -> TokenStats:
    """Call `token_stats_chunked` for models, with products in `dtype` (None: of the weights)."""
    cast = lambda *inputs: tuple(x.to(dtype or inputs[1].dtype) for x in inputs)
    policy, fixed = cast(hidden, model.unembed.W_U, model.unembed.b_U), None
    if reference is not None:
        fixed = cast(ref_hidden, reference.unembed.W_U, reference.unembed.b_U)
    sizes = chunk_sizes(model.cfg.d_vocab, total_memory(hidden.device))
    return token_stats_chunked(*policy, tokens, temperature, support, fixed, *sizes)


def chunk_sizes(d_vocab: int, memory: int | None) -> tuple[int, int]:
    """Return the tokens per chunk and the bytes that may be stored for the backward pass.

    On a GPU, a chunk of logits gets 1/256 of its `memory`, and the stored log-probabilities get
    1/16. Free memory does not matter, so the same seed gives the same run.
    """
    n_logits = max(LOGITS_AT_ONCE, (memory or 0) // 256 // 4)
    return max(MIN_ROWS, n_logits // d_vocab), max(BYTES_KEPT, (memory or 0) // 16)


def token_stats_chunked(
    hidden: Float[Tensor, "batch gen d_model"],
    W_U: Float[Tensor, "d_model d_vocab"],
    b_U: Float[Tensor, " d_vocab"],
    tokens: Int[Tensor, "batch gen"],
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
    n_bytes = tokens.numel() * W_U.shape[1] * max(4, W_U.element_size()) * (1 + len(references))
    keep = torch.is_grad_enabled() and n_bytes <= keep_bytes
    constants = references, flatten(tokens), temperature, support, chunk_rows, keep
    stats = ChunkedStats.apply(flatten(hidden), W_U, b_U, *constants)
    logprobs, entropy, kl = (x.view(tokens.shape) for x in stats)
    kl = None if reference is None else kl.masked_fill(kl > MAX_KL, torch.inf)
    return TokenStats(logprobs, entropy, kl)


class ChunkedStats(torch.autograd.Function):
    """`token_stats_chunked` with its gradient in the logits z, here at temperature 1.

    d log p(a)/dz = [a] - p,   dH/dz = -p (log p + H),   dKL/dz = p (log p - log q - KL)
    """

    @staticmethod
    def forward(ctx, hidden, W_U, b_U, references, tokens, temperature, support, chunk_rows, keep):
        """Compute the statistics chunk by chunk, with one exp for entropy and KL."""
        ctx.chunks = [slice(i, i + chunk_rows) for i in range(0, max(1, len(tokens)), chunk_rows)]
        ctx.constants, stats, kept = (references, tokens, temperature, support), [], []
        for rows in ctx.chunks:
            log_p, log_ratio = chunk_logprobs([(hidden, W_U, b_U), *references], rows, temperature)
            in_support = Support(*(x[rows] for x in support)).token_logprobs if support else None
            logprobs, p = (in_support or token_logprobs)(log_p, tokens[rows]), log_p.exp()
            stats.append((logprobs, -(p * log_p).sum(dim=-1), p.mul_(log_ratio).sum(dim=-1)))
            kept += [log_p, log_ratio] if keep else []
            del p, log_p, log_ratio  # free the memory before the next chunk
        stats = [torch.cat(chunks) for chunks in zip(*stats, strict=True)]
        ctx.save_for_backward(hidden, W_U, b_U, *stats, *kept)
        return tuple(stats)

    @staticmethod
    @once_differentiable
    def backward(ctx, *upstream):
        """Compute the gradient of each chunk's logits, then that of the inputs."""
        hidden, W_U, b_U, logprobs, entropy, kl, *kept = ctx.saved_tensors
        references, tokens, temperature, support = ctx.constants
        # gradient of z: p (constant - by_entropy log p + by_kl log p/q) + by_logprob [a]
        counts = torch.stack(upstream).ne(0).any(dim=0)[..., None]
        by_logprob, by_entropy, by_kl = (x[..., None] / temperature for x in upstream)
        by_logprob = by_logprob.masked_fill(logprobs[..., None].isinf(), 0.0)
        constant = -by_entropy * entropy[..., None] - by_kl * kl[..., None]
        constant = constant if support else constant - by_logprob
        grad_hidden, grad_b = torch.empty_like(hidden), 0.0
        grad_W = torch.zeros_like(W_U) if ctx.needs_input_grad[1] else None
        for i, rows in enumerate(ctx.chunks):
            inputs = [(hidden, W_U, b_U), *references], rows, temperature
            log_p, log_ratio = kept[2 * i : 2 * i + 2] or chunk_logprobs(*inputs)
            grad = torch.addcmul(constant[rows], log_p, by_entropy[rows], value=-1)
            grad.addcmul_(log_ratio, by_kl[rows]).mul_(log_p.exp())
            grad.scatter_add_(-1, tokens[rows, :, None], by_logprob[rows])
            if support:
                ids, is_kept = (x[rows] for x in support)
                inside = log_p.gather(-1, ids).masked_fill(~is_kept, LOG_ZERO)
                grad.scatter_add_(-1, ids, -by_logprob[rows] * inside.softmax(dim=-1))
            grad_b = grad_b + grad.masked_fill_(~counts[rows], 0.0).sum(dim=(0, 1))
            del log_p, log_ratio
            grad = grad[:, 0].to(W_U.dtype)
            grad_hidden[rows, 0] = grad @ W_U.T
            if grad_W is not None:
                grad_W.addmm_(hidden[rows, 0].masked_fill(~counts[rows, 0], 0.0).T, grad)
        return grad_hidden, grad_W, grad_b, *(None,) * 6


def chunk_logprobs(models: list[Inputs], rows: slice, temperature: float) -> list[Tensor]:
    """Compute log p and log p - log q over the vocabulary; without a reference, q is 1."""
    log_p, *log_q = [log_probs(linear(x[rows], W_U, b_U), temperature) for x, W_U, b_U in models]
    return [log_p, torch.sub(log_p, *log_q, out=log_q[0]) if log_q else log_p]
