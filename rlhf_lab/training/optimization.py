"""Gradient ascent on the objective: micro-batches, clipping, and no step after nan or inf."""

import copy
import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from rlhf_lab import functional as F
from rlhf_lab.training.rollout import ReplayMinibatch

if TYPE_CHECKING:
    from rlhf_lab.training.ppo import ObjectiveTerms
    from rlhf_lab.training.trainer import RLHFTrainer

CLIPS_IN_STEP = ("cuda",)  # devices on which AdamW's kernel divides the gradients by a scale


@dataclasses.dataclass
class PolicyUpdate:
    """Takes the steps of one learning phase; none after an objective or gradient is not finite."""

    trainer: "RLHFTrainer"
    _finite: bool | Bool[Tensor, ""] = True
    _norm: Float[Tensor, ""] | None = None
    _grad_scale: Float[Tensor, ""] | None = None  # divides the gradients in the fused step

    def accumulate(
        self,
        compute_terms: Callable[..., "ObjectiveTerms"],
        minibatch: ReplayMinibatch,
        kl_coef: float,
    ) -> "ObjectiveTerms":
        """Compute the terms of a minibatch from its parts, and add the gradients of all parts.

        1. Whiten the advantages over the whole minibatch.
        2. Compute the terms of each part (`compute_terms` is `ppo.objective_terms`). They are means
           over tokens or sequences: multiply them by the part's fraction of the minibatch.
        3. Go backward from each part before the next, so that one graph is in memory.
        """
        trainer, args = self.trainer, self.trainer.args
        advantages, mask = minibatch.advantages, minibatch.mask
        if args.normalize_advantages:
            advantages = minibatch.whitened_advantages()
        whole = dataclasses.replace(minibatch, advantages=advantages)
        objective = copy.copy(trainer.objective)
        objective.normalize = False

        def compute_part(part: ReplayMinibatch) -> "ObjectiveTerms":
            terms = compute_terms(trainer.policy, trainer.reference, part, objective, kl_coef)
            return _weigh(terms, part.mask, mask, args.loss_aggregation, objective.average_kl)

        rows = torch.arange(len(mask), device=mask.device)
        world = trainer.world
        if world is not None:
            rows = rows[world.local_slice(len(rows))]
            compute_part = world.wrap_forward(compute_part)
        parts = []
        for indices in rows.split(args.micro_batch_size or len(rows)):
            terms = compute_part(whole[indices])
            terms.objective.backward()
            parts.append(terms)
        total = _sum(parts)
        return total if world is None else world.sum_terms(total)

    def backward(self, objective: Float[Tensor, ""]) -> None:
        """Compute the gradient of the objective, unless `accumulate` has done so."""
        self._finite = self._finite & objective.detach().isfinite()
        if self.trainer.step_in_backward is not None:
            self._norm = self.trainer.step_in_backward.climb(objective, self)
        elif self.trainer.world is not None:
            self.trainer.world.sum_gradients(self.trainer.policy)
        elif self.trainer.args.micro_batch_size is None:
            graph = self.trainer.step_graph
            objective.backward() if graph is None else graph.backward(objective)

    def clip(self, max_grad_norm: float | None) -> Float[Tensor, ""]:
        """Scale all gradients in place to a common norm of at most a limit; return the norm.

        1. Take the Euclidean norm over all parameters together.
        2. Multiply every gradient by limit / norm if the norm is above the limit, or not finite;
           otherwise by 1. On CUDA, `step` does so in one pass with the update.
        """
        if self.trainer.step_in_backward is None:
            weights = [p for p in self.trainer.policy.parameters() if p.requires_grad]
            gradients = [p.grad for p in weights if p.grad is not None]
            if self._norm is None and self.trainer.phase == 0 and len(gradients) < len(weights):
                _warn_without_gradient(self.trainer.policy)
            norm = torch.nn.utils.get_total_norm(gradients)
            if hasattr(norm, "full_tensor"):  # of shards, which each process scales for itself
                norm, gradients = norm.full_tensor(), [shard.to_local() for shard in gradients]
            if max_grad_norm is not None and gradients:
                scale = torch.where(norm <= max_grad_norm, 1.0, max_grad_norm / (norm + 1e-6))
                if norm.device.type in CLIPS_IN_STEP and can_clip_in_step(self.trainer):
                    self._grad_scale = (1 / scale).float()  # as the kernel reads it
                else:
                    torch._foreach_mul_(gradients, scale)
            self._norm = norm
        self._finite = self._finite & self._norm.isfinite()
        return self._norm

    def step(self, norm: Float[Tensor, ""] | None = None) -> None:
        """Step the optimizer, or one parameter in the backward pass, by the gradient's `norm`."""
        if self.trainer.step_in_backward is not None and norm is None:
            return
        optimizer, finite = self.trainer.optimizer, self._finite
        finite = finite if norm is None else finite & norm.isfinite()
        is_fused = all(group.get("fused") for group in optimizer.param_groups)
        if isinstance(optimizer, AdamW) and is_fused and finite.device.type in ("cpu", "cuda"):
            # the kernel reads both on its device; found_inf = 1 keeps weights and moments
            optimizer.found_inf, optimizer.grad_scale = (~finite).float(), self._grad_scale
            try:
                optimizer.step()
            finally:
                del optimizer.found_inf, optimizer.grad_scale
        elif finite:
            optimizer.step()


def can_clip_in_step(trainer: "RLHFTrainer") -> bool:
    is_fused = all(group.get("fused") for group in trainer.optimizer.param_groups)
    return isinstance(trainer.optimizer, AdamW) and is_fused and trainer.world is None


def _warn_without_gradient(policy: nn.Module) -> None:
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    cut_off = [name for name, p in trained.items() if p.grad is None and name[:7] != "critic."]
    if cut_off:
        warnings.warn(
            f"{len(cut_off)} of {len(trained)} trained weights get no gradient, such as "
            f"{cut_off[0]}. Check interventions, hooks and custom functions for detach().",
            stacklevel=4,
        )


def _weigh(
    terms: "ObjectiveTerms",
    part: Bool[Tensor, "part gen"],
    whole: Bool[Tensor, "minibatch gen"],
    of_surrogate: str,
    of_kl: str,
) -> "ObjectiveTerms":
    of_part, of_tokens, of_kl = (
        F.aggregation_denominator(part, name) / F.aggregation_denominator(whole, name).clamp(min=1)
        for name in (of_surrogate, "token_mean", of_kl)
    )
    surrogate, kl = of_part * terms.clipped_surrogate, of_kl * terms.kl_penalty
    value_loss, bonus = of_tokens * terms.value_loss, of_tokens * terms.entropy_bonus
    total = surrogate - value_loss + bonus - kl
    return type(terms)(total, surrogate, value_loss, bonus, kl, terms.logprobs, terms.values)


def _sum(parts: list["ObjectiveTerms"]) -> "ObjectiveTerms":
    columns = zip(*(vars(part).values() for part in parts), strict=True)
    detached = [[x.detach() for x in column] for column in columns]
    return type(parts[0])(*(torch.cat(c) if c[0].ndim else sum(c) for c in detached))


class StepInBackward:
    """Steps each parameter as soon as its gradient is computed, and frees the gradient.

    Hooks on the parameters do it during `climb`; other backward passes are unaffected. Without
    clipping by a common norm, the weights are as after one step at the end.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._update: PolicyUpdate | None = None
        self._norms: list[Float[Tensor, ""]] = []
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(partial(self._step, index))

    def climb(self, objective: Float[Tensor, ""], update: PolicyUpdate) -> Float[Tensor, ""]:
        """Go backward from the objective and step; return the norm of the whole gradient."""
        self.optimizer.zero_grad()
        self._update, self._norms = update, []
        try:
            objective.backward()
        finally:
            self._update = None
        return torch.linalg.vector_norm(torch.stack(self._norms))

    def _step(self, index: int, parameter: Tensor) -> None:
        if self._update is None:
            return
        self._norms.append(torch.linalg.vector_norm(parameter.grad))
        groups = self.optimizer.param_groups
        self.optimizer.param_groups = [groups[index] | {"params": [parameter]}]
        try:
            self._update.step(self._norms[-1])
        finally:
            self.optimizer.param_groups = groups
        parameter.grad = None
