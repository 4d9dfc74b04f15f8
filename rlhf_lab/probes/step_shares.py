"""Contributions of tokens to a step's objective, and a target, as functions of the weights."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from rlhf_lab.config import RLHFArgs
from rlhf_lab.diffing.contrast import Contrast
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.device import exact, has_float64
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.probes.eval_text import EvalText
from rlhf_lab.probes.step_influence import ByWeight, Shares
from rlhf_lab.probes.step_ledger import ledger_entries
from rlhf_lab.training import ReplayMinibatch

OBJECTIVE_TERMS = ("surrogate", "value", "entropy", "kl")  # with their signs in the objective
Target = Callable[[ByWeight], Float[Tensor, ""]]


class _Caller(nn.Module):
    """A policy whose weights `functional_call` exchanges during a function."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, function: Callable[[Any], Any]) -> Any:
        return function(self.policy)


def with_weights(policy: nn.Module, weights: ByWeight, function: Callable[[Any], Any]) -> Any:
    """Call a function with a model that has other weights during the call."""
    named = {f"policy.{name}": weight for name, weight in weights.items()}
    return functional_call(_Caller(policy), named, (function,))


def shares_of(
    policy: TransformerWithValueHead,
    reference: HookedModel,
    minibatch: ReplayMinibatch,
    args: RLHFArgs,
    kl_coef: float,
) -> Shares:
    """Return a function from weights to each token's contribution to the objective, by term.

    Contributions sum to the objective; they are 0 where the mask is False.
    """

    def shares(weights: ByWeight) -> Float[Tensor, "term minibatch gen"]:
        entries = with_weights(
            policy,
            weights,
            lambda model: ledger_entries(model, reference, minibatch, args, kl_coef),
        )
        n = minibatch.mask.sum()
        return torch.stack(
            [
                entries["surrogate"],
                -entries["value_loss"],
                args.ent_coef * entries["entropy"] / n,
                -kl_coef * entries["kl"] / n,
            ]
        )

    return shares


def exact_copy(model: HookedModel) -> HookedModel:
    """Copy a model with its hooks in float64, to the CPU if its device lacks float64."""
    device = next(model.parameters()).device
    copied = copy.deepcopy(model).to(device if has_float64(device) else "cpu", print_details=False)
    return copied.to(torch.float64, print_details=False)


def logit_difference_target(
    model: HookedModel, text: EvalText, pos: int, words: Contrast
) -> Target:
    """Return the mean logit difference of words after a position of each text, by weights."""

    def difference(model: HookedModel) -> Float[Tensor, ""]:
        logits = model(text.tokens, attention_mask=torch.ones_like(text.tokens))
        return words.of(text.at(logits, pos)).mean()

    def target(weights: ByWeight) -> Float[Tensor, ""]:
        first = next(model.parameters())
        prefix = "base_model."
        named = {n.removeprefix(prefix): x for n, x in weights.items() if n.startswith(prefix)}
        return with_weights(model, {n: x.to(first) for n, x in named.items()}, difference)

    return target


def slope_of(target: Target, params: ByWeight) -> dict[str, Float[Tensor, "..."]]:
    """Return the gradient of a target by all weights that it depends on, in float64."""
    leaves = {name: exact(x).clone().requires_grad_() for name, x in params.items()}
    with torch.enable_grad():
        slopes = torch.autograd.grad(target(leaves), list(leaves.values()), allow_unused=True)
    found = zip(leaves, slopes, strict=True)
    return {name: slope for name, slope in found if slope is not None}
