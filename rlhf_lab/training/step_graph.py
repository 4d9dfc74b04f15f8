"""Forward pass, objective and gradient of a minibatch as one CUDA graph, kept across phases."""

import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rlhf_lab.models import cuda_graphs
from rlhf_lab.models.cuda_graphs import Key, is_unchanged, snapshot, verified_capture
from rlhf_lab.models.forward import replaced
from rlhf_lab.models.hooked_model import has_hooks
from rlhf_lab.samples import Rows
from rlhf_lab.training.rollout import ReplayMinibatch

if TYPE_CHECKING:
    from rlhf_lab.training.ppo import ObjectiveTerms
    from rlhf_lab.training.trainer import RLHFTrainer

MAX_TOKENS = 8192  # per minibatch; in larger ones, kernels take longer than their launches
MINIBATCH_EVENTS = ("before_minibatch", "after_loss", "after_backward", "after_step")


class StepGraph:
    """Replays forward and backward pass of a minibatch, which Python otherwise starts by kernels.

    A replay reads the weights in place, and copies of the minibatch and of `kl_coef`. Python code
    in a step would run at the capture only, so such steps run eagerly, for a `reason`. If a module
    or a setting changes, the graph is captured again.
    """

    def __init__(self, trainer: "RLHFTrainer", capture: Callable = cuda_graphs.capture) -> None:
        self.trainer, self.capture, self.n_captures = trainer, capture, 0
        self.reason: str | None = None
        self._error: str | None = None  # why no capture is tried any more
        self._snapshot: Key = [], ()
        self._key: Key = [], ()  # at the capture
        self._replay: Callable[[], Any] | None = None
        self._learned: list[nn.Parameter] = []
        self._gradients: list[Tensor | None] = []
        self._objective: Float[Tensor, ""] | None = None  # of the last replay

    def replayed(self, compute: Callable[..., "ObjectiveTerms"]) -> Callable[..., "ObjectiveTerms"]:
        """Return `compute`, which is `ppo.objective_terms`, replayed if possible."""
        self._objective, self.reason = None, self._error or self.phase_obstacle()
        if self.reason is not None:
            return compute
        self._snapshot = self.snapshot()

        def compute_terms(
            policy: nn.Module, reference: nn.Module, minibatch: ReplayMinibatch, *settings: Any
        ) -> "ObjectiveTerms":
            self._objective, self.reason = None, self._error or self.obstacle(minibatch)
            objects, values = self._snapshot
            shapes = [(x.shape, x.dtype) for x in minibatch_tensors(minibatch)]
            others = [x for x in vars(minibatch).items() if not isinstance(x[1], Tensor | Rows)]
            key = objects, (*values, compute, *shapes, *others)
            if self.reason is None and not self.hold(key, minibatch, settings[-1]):
                self.reason = self._error = self.recapture(key, compute, minibatch, settings[-1])
            if self.reason is None:
                return self.replay()
            return compute(policy, reference, minibatch, *settings)

        return compute_terms

    def phase_obstacle(self) -> str | None:
        """Return why this phase cannot be replayed; None if it can."""
        trainer, args, forward = self.trainer, self.trainer.args, self.trainer.forward
        obstacles = {
            "cuda_graphs=False": not forward.graphs,
            "a split minibatch": args.micro_batch_size is not None or trainer.world is not None,
            "optimizer_in_backward": args.optimizer_in_backward,
            "activation_checkpointing": forward.recompute or bool(forward.units),
            "custom functions": trainer.objective.is_custom,
            "float64 weights": next(trainer.policy.parameters()).dtype == torch.float64,
        }
        return next((reason for reason, is_true in obstacles.items() if is_true), None)

    def obstacle(self, minibatch: ReplayMinibatch) -> str | None:
        trainer, policy, callbacks = self.trainer, self.trainer.policy, self.trainer.callbacks
        if any(map(callbacks.registered.get, MINIBATCH_EVENTS)):  # which can change anything
            self._snapshot = self.snapshot()
        obstacles = {
            "a debugger": sys.gettrace() is not None,
            "a callback of after_loss": bool(callbacks.registered.get("after_loss")),
            "hooks": has_hooks(policy) or has_hooks(trainer.reference),
            "hooks on parameters": any(
                p._backward_hooks or p._post_accumulate_grad_hooks for p in policy.parameters()
            ),
            f"more than {MAX_TOKENS} tokens": minibatch.tokens.numel() > MAX_TOKENS,
        }
        return next((reason for reason, is_true in obstacles.items() if is_true), None)

    def snapshot(self) -> Key:
        trainer, forward = self.trainer, self.trainer.forward
        objects, values = snapshot(trainer.policy, trainer.reference)
        objects += [trainer.objective, *vars(trainer.objective).values()]
        return objects, (*values, forward.dtype, forward.tf32)

    def hold(self, key: Key, minibatch: ReplayMinibatch, kl_coef: float) -> bool:
        """Copy a minibatch to the inputs of the graph; return False if it does not fit."""
        if not is_unchanged(key, self._key):
            return False
        torch._foreach_copy_(minibatch_tensors(self._minibatch), minibatch_tensors(minibatch))
        self._kl_coef.fill_(kl_coef)
        return True

    def recapture(
        self, key: Key, compute: Callable, minibatch: ReplayMinibatch, kl_coef: float
    ) -> str | None:
        """Capture the graph; return an error if that fails or its gradient is not autograd's."""
        trainer, self._replay, self._gradients = self.trainer, None, []  # frees memory
        self._key, self._minibatch = key, minibatch.map(Tensor.clone)
        self._kl_coef = torch.full((), kl_coef, device=minibatch.tokens.device)
        self._learned = [p for p in trainer.policy.parameters() if p.requires_grad]
        models, inputs = (trainer.policy, trainer.reference), (trainer.objective, self._kl_coef)
        # an autograd graph that is still referenced would bind the parameters to another stream
        leaves = {p: p.detach().requires_grad_() for p in self._learned}
        parts = [part._parameters for part in trainer.policy.modules()]
        slots = [(table, name) for table in parts for name, p in table.items() if p in leaves]
        aliases = [leaves[table[name]] for table, name in slots]

        def step() -> tuple["ObjectiveTerms", list[Tensor | None]]:
            for leaf in leaves.values():
                leaf.grad = None
            with replaced(slots, aliases):
                terms = compute(*models, self._minibatch, *inputs)
                terms.objective.backward()
            return map_terms(terms, Tensor.detach), [leaf.grad for leaf in leaves.values()]

        self.n_captures += 1
        self._replay, error = verified_capture(step, self.capture)
        if error is not None:
            warnings.warn(f"cuda_graphs is switched off: {error}.", stacklevel=3)
        return error

    def replay(self) -> "ObjectiveTerms":
        """Return the terms of the minibatch that was copied last, without an autograd graph."""
        terms, self._gradients = self._replay()
        terms = map_terms(terms, Tensor.clone)
        self._objective = terms.objective
        return terms

    def backward(self, objective: Float[Tensor, ""]) -> None:
        """Go backward from an objective, or assign the gradients if it was replayed."""
        if objective is not self._objective:
            objective.backward()
            return
        is_read = self.trainer.callbacks.registered.get("after_step")  # which may keep gradients
        for parameter, gradient in zip(self._learned, self._gradients, strict=True):
            parameter.grad = gradient.clone() if is_read and gradient is not None else gradient


def minibatch_tensors(minibatch: ReplayMinibatch) -> list[Tensor]:
    tensors: list[Tensor] = []
    minibatch.map(lambda x: tensors.append(x) or x)
    return tensors


def map_terms(terms: "ObjectiveTerms", function: Callable[[Tensor], Tensor]) -> "ObjectiveTerms":
    return type(terms)(*map(function, vars(terms).values()))
