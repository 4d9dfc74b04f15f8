"""The chunked read-out as an autograd function, forward and backward."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
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


class Settings(NamedTuple):
    """How to go through the rows, and whether to keep the logarithms for the backward pass."""

    temperature: float
    chunk_rows: int
    keep: bool


class Logs(NamedTuple):
    """log p, and log p - log q where there is a reference, for some rows.

    Where p is 0 they hold LOG_OF_ZERO and 0, so that their products with p are 0.
    """

    policy: Float[Tensor, "rows d_vocab"]
    ratio: Float[Tensor, "rows d_vocab"] | None

    def of(self, rows: slice) -> "Logs":
        """The same for some of these rows."""
        return Logs(self.policy[rows], None if self.ratio is None else self.ratio[rows])


class TokenStatsFunction(torch.autograd.Function):
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
        scan, kept = _Scan(*inputs, ctx.settings), Logs(kept_policy, kept_ratio)
        weights = scan.row_weights(upstream, entropy, kl)
        grads = _Gradients(scan, weights.counts, ctx.needs_input_grad)
        for rows, scratch in scan.chunks():
            logs = kept.of(rows) if scan.keep else scratch
            probs = scan.read_probs(logs) if scan.keep else scan.fill(logs, rows)
            grads.add(scan.grad_logits(logs, probs, rows, weights), rows)
        return *grads.result(), *(None,) * 7


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

    def new_logs(self, rows: int) -> Logs:
        """Unfilled logarithms."""
        policy = self.new(rows, self.d_vocab)
        return Logs(policy, None if self.reference is None else torch.empty_like(policy))

    def chunks(self) -> Iterator[tuple[slice, Logs | None]]:
        """Each chunk's rows, and scratch logarithms of that many rows unless they are kept."""
        for start in range(0, self.n_rows, self.chunk_rows):
            rows = slice(start, min(start + self.chunk_rows, self.n_rows))
            yield rows, None if self.keep else self.scratch.of(slice(rows.stop - start))

    def fill(self, logs: Logs, rows: slice) -> Float[Tensor, "chunk d_vocab"]:
        """Compute the logarithms of some rows, in place, and return their probabilities."""
        self.read_out(self.policy, rows, logs.policy)
        if logs.ratio is not None:
            self.read_out(self.reference, rows, logs.ratio)
            torch.sub(logs.policy, logs.ratio, out=logs.ratio)
        logs.policy.clamp_(min=LOG_OF_ZERO)
        probs = self.read_probs(logs)
        if logs.ratio is not None:
            # 0 where a probability is 0, and the rest as it is, in one pass over memory
            ratio = logs.ratio
            torch.ops.aten.threshold_backward.grad_input(ratio, probs, 0.0, grad_input=ratio)
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

    def read_probs(self, logs: Logs) -> Float[Tensor, "chunk d_vocab"]:
        """The policy's probabilities."""
        return torch.exp(logs.policy, out=self.probs[: len(logs.policy)])

    def mean(
        self, probs: Float[Tensor, "chunk d_vocab"], x: Float[Tensor, "chunk d_vocab"]
    ) -> Float[Tensor, " chunk"]:
        """The mean of x over the vocabulary under the policy."""
        return torch.mul(probs, x, out=self.work[: len(probs)]).sum(dim=-1)

    def score(self, logs: Logs, rows: slice) -> Float[Tensor, " chunk"]:
        """The sampled tokens' log-probabilities, within the support."""
        if self.support_tokens is None:
            logprobs = logs.policy.gather(1, self.tokens[rows, None])
        else:
            sampled = self.sampled(rows)
            logprobs = self.support_logprobs(logs, rows).where(sampled, 0.0).sum(-1, keepdim=True)
            logprobs = logprobs.masked_fill(~sampled.any(dim=-1, keepdim=True), -torch.inf)
        return logprobs.masked_fill(logprobs <= LOG_OF_ZERO, -torch.inf)[:, 0]

    def support_logprobs(self, logs: Logs, rows: slice) -> Float[Tensor, "chunk width"]:
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
        self, logs: Logs, probs: Float[Tensor, "chunk d_vocab"], rows: slice, weights: _RowWeights
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
