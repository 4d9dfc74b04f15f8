"""Replay memory: the rollout of a phase, split into shuffled minibatches."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.samples import Rows, Support
from rlhf_lab.training.rollout import Rollout


@dataclass(frozen=True)
class ReplayMinibatch(Rows):
    """Some sequences of a rollout, as inputs of the objective; see `Samples` and `Rollout`.

    `padded` is False if the attention mask hides nothing.
    """

    tokens: Int[Tensor, "minibatch seq"]
    attention_mask: Bool[Tensor, "minibatch seq"]
    mask: Bool[Tensor, "minibatch gen"]
    logprobs: Float[Tensor, "minibatch gen"]
    values: Float[Tensor, "minibatch gen"]
    advantages: Float[Tensor, "minibatch gen"]
    returns: Float[Tensor, "minibatch gen"]
    ref_residuals: Float[Tensor, "minibatch gen d_model"]
    support: Support | None
    ref_logprobs: Float[Tensor, "minibatch gen"] | None = None
    padded: bool = True
    teaching: Bool[Tensor, " minibatch"] | None = None
    engine_logprobs: Float[Tensor, "minibatch gen"] | None = None

    @property
    def prefix_len(self) -> int:
        """Prompt tokens per row, padding and BOS included."""
        return self.tokens.shape[1] - self.mask.shape[1]

    def whitened_advantages(self) -> Float[Tensor, "minibatch gen"]:
        """The advantages as the surrogate takes them with `normalize_advantages`."""
        return F.whiten_over_groups(self.advantages, self.mask, self.teaching)


@dataclass(frozen=True)
class ReplayMemory:
    """The rollout of one phase, split into shuffled minibatches.

    Args:
        rollout: what to learn from.
        num_minibatches: minibatches per pass; divides the batch.
        passes: number of passes over the batch.
    """

    rollout: Rollout
    num_minibatches: int
    passes: int

    def get_minibatches(self, generator: torch.Generator) -> Iterator[ReplayMinibatch]:
        """Split the batch into minibatches, `passes` times, each time in a new order.

        1. Draw an order of the sequences for each pass, by `torch.randperm(batch, generator=...)`.
        2. Cut it into `num_minibatches` equal runs of neighbors.
        3. Take these rows of every tensor.

        Args:
            generator: on the CPU, so the order is the same on every device.
        """
        batch, samples = len(self.rollout.texts), self.rollout.samples
        orders = [torch.randperm(batch, generator=generator) for _ in range(self.passes)]
        minibatches = torch.stack(orders).reshape(self.passes * self.num_minibatches, -1)
        padded = samples.is_padded
        for rows in minibatches.to(samples.tokens.device):
            yield self._take(rows, padded)

    def _take(self, rows: Int[Tensor, " rows"], padded: bool) -> ReplayMinibatch:
        samples, ref_logprobs = self.rollout.samples, self.rollout.ref_logprobs
        teaching, engine = self.rollout.teaching, samples.engine_logprobs
        return ReplayMinibatch(
            tokens=samples.tokens[rows],
            attention_mask=samples.attention_mask[rows],
            mask=samples.mask[rows],
            logprobs=samples.logprobs[rows],
            values=samples.values[rows],
            advantages=self.rollout.advantages[rows],
            returns=self.rollout.returns[rows],
            ref_residuals=self.rollout.ref_residuals[rows],
            support=None if samples.support is None else samples.support[rows],
            ref_logprobs=None if ref_logprobs is None else ref_logprobs[rows],
            padded=padded,
            teaching=None if teaching is None else teaching[rows],
            engine_logprobs=None if engine is None else engine[rows],
        )
