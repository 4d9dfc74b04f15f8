"""Gradient ascent on the objective: micro-batches, clipping, and the guard against nan and inf."""

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.training.objective import Objective
from rlhf_lab.training.optim import clip_gradients, step_if
from rlhf_lab.training.replay import ReplayMinibatch

if TYPE_CHECKING:
    from rlhf_lab.training.ppo import ObjectiveTerms
    from rlhf_lab.training.trainer import RLHFTrainer


class PolicyUpdate:
    """Steps up the objective, whole, in micro-batches or during the backward pass.

    One is made for each learning phase. Once an objective or a gradient was not finite, no further
    step changes a weight; the host learns of it when the phase is over.

    Attributes:
        objective: what each part is to be measured by.
    """

    def __init__(self, trainer: "RLHFTrainer", objective: Objective | None = None) -> None:
        objective = objective or trainer.objective
        self.args, self.policy = objective.args, trainer.policy
        self.optimizer, self._in_backward = trainer.optimizer, trainer.step_in_backward
        self.world, self.weights = trainer.world, trainer.weights
        self._cut = self.args.micro_batch_size is not None or self.world.has_group
        self.objective = objective.of_a_part() if self._cut else objective
        self._parts: list[ReplayMinibatch] = []
        self._mask: Bool[Tensor, "minibatch gen"] | None = None
        self._norm: Float[Tensor, ""] | None = None
        self._finite: Bool[Tensor, ""] | None = None

    def parts(self, minibatch: ReplayMinibatch) -> list[ReplayMinibatch]:
        """The minibatch, or its micro-batches of `micro_batch_size` sequences.

        Of several ranks each has its share of the rows. Advantages are whitened over the whole
        minibatch before it is cut.
        """
        self._parts = [minibatch]
        if self._cut:
            advantages = minibatch.advantages
            if self.args.normalize_advantages:
                advantages = minibatch.whitened_advantages()
            whole = dataclasses.replace(minibatch, advantages=advantages)
            rows = torch.arange(len(advantages), device=advantages.device)
            own = rows[self.world.share(len(rows))]
            size = self.args.micro_batch_size or len(own)
            self._parts, self._mask = [whole[part] for part in own.split(size)], whole.mask
        return self._parts

    def total(self, terms: Iterable["ObjectiveTerms"]) -> "ObjectiveTerms":
        """The terms of the whole minibatch from those of its parts, whose order is that of `parts`.

        A whole minibatch's terms are returned as they are. Micro-batches' terms are means over
        their tokens (or sequences): each is weighed by its share of the minibatch's tokens (or
        sequences), so that they add up to those of the whole, and its gradient is taken before the
        next part is run, so that only one graph is in memory. Their sum has no graph.
        """
        if not self._cut:
            (whole,) = terms
            return whole
        found: list[ObjectiveTerms] = []
        coming = iter(terms)
        for part in self._parts:
            weighed = self.weights.run(lambda part=part: self._weighed(next(coming), part))
            weighed.objective.backward()
            found.append(weighed)
        return self._of_all_ranks(_sum(found))

    def _weighed(self, terms: "ObjectiveTerms", part: ReplayMinibatch) -> "ObjectiveTerms":
        """The terms of a part, as they add to those of the minibatch."""
        return _weigh(terms, part.mask, self._mask, self.args.loss_aggregation)

    def _of_all_ranks(self, own: "ObjectiveTerms") -> "ObjectiveTerms":
        """The terms of the whole minibatch from those of this rank's rows."""
        scalars = {name: x.clone() for name, x in vars(own).items() if not x.ndim}
        rows = {name: self.world.gather(x) for name, x in vars(own).items() if x.ndim}
        self.world.add_up([*scalars.values()])
        return dataclasses.replace(own, **scalars, **rows)

    def backward(self, objective: Float[Tensor, ""]) -> None:
        """Add the objective's gradient to the policy's.

        For micro-batches that is done already, and for ranks all but the sum over them. With
        `optimizer_in_backward` each parameter is stepped as soon as its gradient is there.
        """
        finite = self._still_finite(objective)
        if self._in_backward is not None:
            self._norm = self._in_backward.climb(objective, finite)
        elif not self._cut:
            objective.backward()
        else:
            self.weights.add_up()

    def clip(self, max_grad_norm: float | None) -> Float[Tensor, ""]:
        """Scale the gradient down to a norm of `max_grad_norm` at most; returns the norm before."""
        norm = self._norm
        if self._in_backward is None:
            norm = clip_gradients(self.policy, max_grad_norm)
        self._still_finite(norm)
        return norm

    def step(self) -> None:
        """One step of the optimizer, unless something was not finite."""
        if self._in_backward is None:
            step_if(self._finite, self.optimizer)

    def _still_finite(self, value: Float[Tensor, ""]) -> Bool[Tensor, ""]:
        """Whether this is finite, and everything in this phase before it was."""
        finite = value.detach().isfinite()
        self._finite = finite if self._finite is None else self._finite & finite
        return self._finite


def _weigh(
    terms: "ObjectiveTerms",
    part: Bool[Tensor, "part gen"],
    whole: Bool[Tensor, "minibatch gen"],
    aggregation: str,
) -> "ObjectiveTerms":
    """The terms of a part, times its share of what they are means over."""
    by_token, by_aggregation = (
        F.aggregation_denominator(part, name) / F.aggregation_denominator(whole, name).clamp(min=1)
        for name in ("token_mean", aggregation)
    )
    surrogate = by_aggregation * terms.clipped_surrogate
    value_loss, entropy_bonus, kl_penalty = (
        by_token * term for term in (terms.value_loss, terms.entropy_bonus, terms.kl_penalty)
    )
    return dataclasses.replace(
        terms,
        objective=surrogate - value_loss + entropy_bonus - kl_penalty,
        clipped_surrogate=surrogate,
        value_loss=value_loss,
        entropy_bonus=entropy_bonus,
        kl_penalty=kl_penalty,
    )


def _sum(parts: list["ObjectiveTerms"]) -> "ObjectiveTerms":
    """Scalars added, tensors of tokens one below the other."""

    def joined(name: str) -> Tensor:
        values = [getattr(part, name).detach() for part in parts]
        return torch.cat(values) if values[0].ndim else sum(values)

    return type(parts[0])(**{name: joined(name) for name in vars(parts[0])})
