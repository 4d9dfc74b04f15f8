"""Log-probs, entropy and KL straight from the final residuals, a chunk of rows at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_lab.functional.masks import at_least_float32

LOG_OF_ZERO = -1e30
"""Stands for log 0 inside this file, where 0 * log 0 must come out as 0."""


@dataclass(frozen=True)
class Readout:
    """Residuals and the unembedding that reads them: logits = hidden @ W_U + b_U.

    Args:
        hidden: the residual after the final norm, gain and bias included, at the states before the
            generated tokens, those of all sequences one after the other.
        W_U: the unembedding, as HookedTransformer holds it.
        b_U: its bias, zeros when None; a word whose bias is -inf cannot be said.
    """

    hidden: Float[Tensor, "rows d_model"]
    W_U: Float[Tensor, "d_model d_vocab"]
    b_U: Float[Tensor, " d_vocab"] | None = None


class TokenStats(NamedTuple):
    """What the objective needs to know of each generated token, in nats.

    Args:
        logprobs: of the sampled tokens, within the support if there is one.
        entropy: of the policy, over the whole vocabulary.
        kl: KL(policy || reference), over the whole vocabulary; None without a reference.
    """

    logprobs: Float[Tensor, " rows"]
    entropy: Float[Tensor, " rows"]
    kl: Float[Tensor, " rows"] | None


def token_stats_chunked(
    policy: Readout,
    tokens: Int[Tensor, " rows"],
    reference: Readout | None = None,
    temperature: float = 1.0,
    support: tuple[Int[Tensor, "rows width"], Bool[Tensor, "rows width"]] | None = None,
    chunk_rows: int = 256,
    keep_bytes: int = 2**29,
) -> TokenStats:
    """Give what `get_logprobs`, `entropy_per_token` and `kl_per_token` give, by chunks of rows.

    1. Read out policy and reference, and take the log-softmax of both at the temperature.
    2. Pick the sampled token's entry, renormalised over `support` if there is one: token ids,
       distinct in a row, and which of them are kept. A token outside has log-probability -inf.
    3. Sum p log p and p (log p - log q) over the words with p > 0.
    4. Keep log p and log p - log q for the backward pass if they fit into `keep_bytes`; otherwise
       compute them there again, to the same bits.

    Gradients reach the policy's tensors, in their dtypes; the reference is a constant. A row whose
    upstream gradients are all 0 adds exactly 0, even if it holds nan or inf, so that a mask on the
    statistics is enough. Half-precision input is multiplied as it is and gives float32 results.
    There is no second derivative. Raises ValueError if shapes or dtypes disagree, or unless
    temperature > 0 and chunk_rows > 0.

    d log p(a)/dz = [a] - p,   dH/dz = -p (log p + H),   dKL/dz = p (log p - log q - KL)
    """
    _check_settings(temperature, chunk_rows)
    _check_readout("policy", policy, tokens, policy)
    learned, fixed = (policy.hidden, policy.W_U, policy.b_U), (None,) * 3
    if reference is not None:
        _check_readout("reference", reference, tokens, policy)
        fixed = (reference.hidden, reference.W_U, reference.b_U)
        fixed = tuple(None if x is None else x.detach() for x in fixed)
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in learned)
    itemsize = at_least_float32(policy.hidden[:0]).element_size()
    log_bytes = len(tokens) * policy.W_U.shape[1] * itemsize * (1 if reference is None else 2)
    settings = _Settings(temperature, chunk_rows, keep=learns and log_bytes <= keep_bytes)
    support = (None, None) if support is None else support
    return TokenStats(*_TokenStats.apply(*learned, *fixed, tokens, *support, settings))


def _check_settings(temperature: float, chunk_rows: int) -> None:
    """Refuse numbers that are out of range."""
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; give a temperature above 0.")
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}; give at least 1 row per chunk.")


def _check_readout(
    name: str, readout: Readout, tokens: Int[Tensor, " rows"], policy: Readout
) -> None:
    """Refuse a readout that does not fit the tokens or the policy's vocabulary and dtype."""
    d_model, d_vocab = readout.hidden.shape[-1], policy.W_U.shape[-1]
    wanted = {"hidden": (len(tokens), d_model), "W_U": (d_model, d_vocab), "b_U": (d_vocab,)}
    for field, shape in wanted.items():
        x = getattr(readout, field)
        if x is not None and x.shape != shape:
            raise ValueError(
                f"{name}.{field} has shape {tuple(x.shape)} but must have {shape} here; give one "
                "row per token, and both models the same vocabulary."
            )
        if x is not None and x.dtype != policy.hidden.dtype:
            raise ValueError(
                f"{name}.{field} has dtype {x.dtype} but policy.hidden has {policy.hidden.dtype}; "
                "cast one to the other."
            )


class _Settings(NamedTuple):
    """How to go through the rows, and whether to keep the logarithms for the backward pass."""

    temperature: float
    chunk_rows: int
    keep: bool


class _Logs(NamedTuple):
    """log p, and log p - log q where there is a reference, for some rows.

    Where p is 0 they hold LOG_OF_ZERO and 0, so that their products with p are 0.
    """

    policy: Float[Tensor, "rows d_vocab"]
    ratio: Float[Tensor, "rows d_vocab"] | None

    def of(self, rows: slice) -> "_Logs":
        """The same for some of these rows."""
        return _Logs(self.policy[rows], None if self.ratio is None else self.ratio[rows])


class _TokenStats(torch.autograd.Function):
    """The forward and the backward pass of `token_stats_chunked`."""

    @staticmethod
    def forward(ctx, *inputs):
        """Fill in the statistics chunk by chunk, and on the way the logarithms to keep."""
        scan = _Scan(*inputs)
        kept = scan.new_logs(scan.n_rows) if scan.keep else None
        logprobs, entropy, kl = (scan.new(scan.n_rows) for _ in range(3))
        for rows, scratch in scan.chunks():
            logs = kept.of(rows) if scan.keep else scratch
            probs = scan.fill(logs, rows)
            logprobs[rows] = scan.score(logs, rows)
            entropy[rows] = -scan.mean(probs, logs.policy)
            if logs.ratio is not None:
                kl[rows] = scan.mean(probs, logs.ratio)
        kl = None if scan.reference is None else kl
        ctx.save_for_backward(*inputs[:-1], entropy, kl, *(kept or (None, None)))
        ctx.settings = inputs[-1]
        ctx.set_materialize_grads(False)
        return logprobs, entropy, kl

    @staticmethod
    @once_differentiable
    def backward(ctx, *upstream):
        """Turn upstream gradients into those of the logits chunk by chunk, and carry them on."""
        *inputs, entropy, kl, kept_policy, kept_ratio = ctx.saved_tensors
        if upstream[2] is None:
            inputs[3:6], kept_ratio = (None,) * 3, None
        scan, kept = _Scan(*inputs, ctx.settings), _Logs(kept_policy, kept_ratio)
        weights = scan.row_weights(upstream, entropy, kl)
        grads = _Gradients(scan, weights.counts, ctx.needs_input_grad)
        for rows, scratch in scan.chunks():
            logs = kept.of(rows) if scan.keep else scratch
            probs = scan.read_probs(logs) if scan.keep else scan.fill(logs, rows)
            grads.add(scan.grad_logits(logs, probs, rows, weights), rows)
        return *grads.result(), *(None,) * 7


def _keep_where_positive(
    x: Float[Tensor, "rows d_vocab"], probs: Float[Tensor, "rows d_vocab"]
) -> None:
    """Put 0 into x where a probability is 0, and leave the rest, in one pass over memory."""
    torch.ops.aten.threshold_backward.grad_input(x, probs, 0.0, grad_input=x)


class _RowWeights(NamedTuple):
    """What a row's logits' gradient is made of: p (constant - entropy log p + kl ratio), and more.

    `logprob` weighs the gradient of the sampled token's log-probability; `counts` is False where
    every upstream gradient is 0. All but that are divided by the temperature.
    """

    logprob: Float[Tensor, " rows"]
    entropy: Float[Tensor, " rows"]
    kl: Float[Tensor, " rows"]
    constant: Float[Tensor, " rows"]
    counts: Bool[Tensor, " rows"]


class _Scan:
    """One pass over the rows: its inputs, and the buffers that all chunks share."""

    def __init__(self, hidden, W_U, b_U, ref_hidden, ref_W_U, ref_b_U, tokens, ids, kept, settings):
        self.policy = Readout(hidden, W_U, b_U)
        self.reference = None if ref_hidden is None else Readout(ref_hidden, ref_W_U, ref_b_U)
        self.tokens, self.support_tokens, self.support_kept = tokens, ids, kept
        self.temperature, self.chunk_rows, self.keep = settings
        self.n_rows, self.d_vocab = len(tokens), W_U.shape[1]
        self.dtype = at_least_float32(hidden[:0]).dtype
        chunk = min(self.chunk_rows, self.n_rows)
        self.work, self.probs = (self.new(chunk, self.d_vocab) for _ in range(2))
        halved = hidden.dtype != self.dtype
        self.low = self.new(chunk, self.d_vocab, dtype=hidden.dtype) if halved else None
        self.scratch = None if self.keep else self.new_logs(chunk)

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An unfilled tensor on the policy's device."""
        return self.policy.hidden.new_empty(shape, dtype=dtype or self.dtype)

    def new_logs(self, rows: int) -> _Logs:
        """Unfilled logarithms."""
        policy = self.new(rows, self.d_vocab)
        return _Logs(policy, None if self.reference is None else torch.empty_like(policy))

    def chunks(self) -> Iterator[tuple[slice, _Logs | None]]:
        """Each chunk's rows, and scratch logarithms of that many rows unless they are kept."""
        for start in range(0, self.n_rows, self.chunk_rows):
            rows = slice(start, min(start + self.chunk_rows, self.n_rows))
            yield rows, None if self.keep else self.scratch.of(slice(rows.stop - start))

    def fill(self, logs: _Logs, rows: slice) -> Float[Tensor, "chunk d_vocab"]:
        """Compute the logarithms of some rows, in place, and return their probabilities."""
        self.read_out(self.policy, rows, logs.policy)
        if logs.ratio is not None:
            self.read_out(self.reference, rows, logs.ratio)
            torch.sub(logs.policy, logs.ratio, out=logs.ratio)
        logs.policy.clamp_(min=LOG_OF_ZERO)
        probs = self.read_probs(logs)
        if logs.ratio is not None:
            _keep_where_positive(logs.ratio, probs)
        return probs

    def read_out(self, readout: Readout, rows: slice, out: Float[Tensor, "chunk d_vocab"]) -> None:
        """Write the log-softmax of the logits at the temperature into `out`."""
        hidden, logits, scale = readout.hidden[rows], self.work[: len(out)], 1 / self.temperature
        bias = readout.W_U.new_zeros(1) if readout.b_U is None else readout.b_U
        if self.low is None:
            torch.addmm(bias, hidden, readout.W_U, beta=scale, alpha=scale, out=logits)
        else:
            low = torch.mm(hidden, readout.W_U, out=self.low[: len(out)])
            torch.add(bias.to(self.dtype) * scale, low, alpha=scale, out=logits)
        torch.log_softmax(logits, dim=-1, out=out)

    def read_probs(self, logs: _Logs) -> Float[Tensor, "chunk d_vocab"]:
        """The policy's probabilities."""
        return torch.exp(logs.policy, out=self.probs[: len(logs.policy)])

    def mean(
        self, probs: Float[Tensor, "chunk d_vocab"], x: Float[Tensor, "chunk d_vocab"]
    ) -> Float[Tensor, " chunk"]:
        """The mean of x over the vocabulary under the policy."""
        return torch.mul(probs, x, out=self.work[: len(probs)]).sum(dim=-1)

    def score(self, logs: _Logs, rows: slice) -> Float[Tensor, " chunk"]:
        """The sampled tokens' log-probabilities, within the support."""
        if self.support_tokens is None:
            logprobs = logs.policy.gather(1, self.tokens[rows, None])
        else:
            sampled = self.sampled(rows)
            logprobs = self.support_logprobs(logs, rows).where(sampled, 0.0).sum(-1, keepdim=True)
            logprobs = logprobs.masked_fill(~sampled.any(dim=-1, keepdim=True), -torch.inf)
        return logprobs.masked_fill(logprobs <= LOG_OF_ZERO, -torch.inf)[:, 0]

    def support_logprobs(self, logs: _Logs, rows: slice) -> Float[Tensor, "chunk width"]:
        """The log-softmax over the support, -inf at entries that are not kept."""
        inside = logs.policy.gather(1, self.support_tokens[rows])
        return inside.masked_fill(~self.support_kept[rows], -torch.inf).log_softmax(dim=-1)

    def sampled(self, rows: slice) -> Bool[Tensor, "chunk width"]:
        """Where the support holds the sampled token."""
        same = self.support_tokens[rows] == self.tokens[rows, None]
        return same & self.support_kept[rows]

    def row_weights(
        self,
        upstream: tuple[Tensor | None, ...],
        entropy: Float[Tensor, " rows"],
        kl: Float[Tensor, " rows"] | None,
    ) -> _RowWeights:
        """The upstream gradients, made ready for `grad_logits`."""
        zeros = torch.zeros_like(entropy)
        given = [zeros if grad is None else grad for grad in upstream]
        counts = (given[0] != 0) | (given[1] != 0) | (given[2] != 0)
        by_logprob, by_entropy, by_kl = (grad / self.temperature for grad in given)
        constant = -by_entropy * entropy
        if upstream[2] is not None:
            constant = constant - by_kl * kl
        if self.support_tokens is None:
            constant = constant - by_logprob
        return _RowWeights(by_logprob, by_entropy, by_kl, constant, counts)

    def grad_logits(
        self, logs: _Logs, probs: Float[Tensor, "chunk d_vocab"], rows: slice, weights: _RowWeights
    ) -> Float[Tensor, "chunk d_vocab"]:
        """The gradient of some rows' logits, in the work buffer."""
        by_logprob, by_entropy, by_kl, constant, counts = (w[rows, None] for w in weights)
        grad = self.work[: len(probs)]
        torch.addcmul(constant, logs.policy, by_entropy, value=-1, out=grad)
        if logs.ratio is not None:
            grad.addcmul_(logs.ratio, by_kl)
        grad.mul_(probs)
        if self.support_tokens is None:
            grad.scatter_add_(1, self.tokens[rows, None], by_logprob)
        else:
            softmax = self.support_logprobs(logs, rows).exp()
            inside = by_logprob * (self.sampled(rows).to(softmax.dtype) - softmax)
            grad.scatter_add_(1, self.support_tokens[rows], inside)
        return grad.masked_fill_(~counts, 0.0)


class _Gradients:
    """The gradients of the policy's readout that are needed, summed over the chunks."""

    def __init__(self, scan: _Scan, counts: Bool[Tensor, " rows"], needed: tuple[bool, ...]):
        hidden, self.W_U, b_U = scan.policy.hidden, scan.policy.W_U, scan.policy.b_U
        self.low, self.rows_in = scan.low, hidden.masked_fill(~counts[:, None], 0.0)
        self.of_hidden = scan.new(*hidden.shape, dtype=hidden.dtype) if needed[0] else None
        self.of_W_U = torch.zeros_like(self.W_U) if needed[1] else None
        self.of_b_U = torch.zeros_like(b_U, dtype=scan.dtype) if needed[2] else None

    def add(self, grad_logits: Float[Tensor, "chunk d_vocab"], rows: slice) -> None:
        """Carry the gradient of some rows' logits on to the readout."""
        if self.of_b_U is not None:
            self.of_b_U += grad_logits.sum(dim=0)
        if self.low is not None:
            grad_logits = self.low[: len(grad_logits)].copy_(grad_logits)
        if self.of_hidden is not None:
            torch.mm(grad_logits, self.W_U.t(), out=self.of_hidden[rows])
        if self.of_W_U is not None:
            self.of_W_U.addmm_(self.rows_in[rows].t(), grad_logits)

    def result(self) -> tuple[Tensor | None, ...]:
        """The gradients of hidden, W_U and b_U, in their dtypes."""
        of_b_U = None if self.of_b_U is None else self.of_b_U.to(self.W_U.dtype)
        return self.of_hidden, self.of_W_U, of_b_U
