"""Shares of a step's objective as a function of the policy's weights, and what a step may move."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from rlhf_lab import functional as F
from rlhf_lab.config import RLHFArgs
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.models.device import exact, has_float64
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.probes.eval_text import EvalText
from rlhf_lab.probes.step_influence import ByWeight, Shares
from rlhf_lab.probes.step_ledger import ledger_entries
from rlhf_lab.training import ReplayMinibatch

OBJECTIVE_TERMS = ("surrogate", "value", "entropy", "kl")
"""The terms of the objective, each with the sign that it has in it."""
Target = Callable[[ByWeight], Float[Tensor, ""]]


class _Caller(nn.Module):
    """A policy whose weights `functional_call` may exchange while a function looks at it."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, function: Callable[[Any], Any]) -> Any:
        return function(self.policy)


def with_weights(policy: nn.Module, weights: ByWeight, function: Callable[[Any], Any]) -> Any:
    """What a function says of a model with other weights; the model keeps its own."""
    named = {f"policy.{name}": weight for name, weight in weights.items()}
    return functional_call(_Caller(policy), named, (function,))


def shares_of(
    policy: TransformerWithValueHead,
    reference: HookedModel,
    minibatch: ReplayMinibatch,
    args: RLHFArgs,
    kl_coef: float,
) -> Shares:
    """What each token adds to the objective, term by term, as a function of the weights.

    Over terms and tokens it sums to the objective; 0 where the mask is False.
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
    """A copy of a model with its hooks, in float64: on its device, or else on the CPU."""
    device = next(model.parameters()).device
    copied = copy.deepcopy(model).to(device if has_float64(device) else "cpu", print_details=False)
    return copied.to(torch.float64, print_details=False)


def logit_difference_target(
    model: HookedModel, text: EvalText, pos: int, words: tuple[int, int]
) -> Target:
    """The mean logit difference of two words behind a position of each sequence of a text."""
    word, other = words

    def difference(model: HookedModel) -> Float[Tensor, ""]:
        logits = text.at(model(text.tokens, attention_mask=torch.ones_like(text.tokens)), pos)
        return (logits[:, word] - logits[:, other]).mean()

    return _of_base_model(model, difference)


def kl_target(
    model: HookedModel,
    reference: HookedModel,
    text: EvalText,
    prefix_len: int,
    temperature: float,
) -> Target:
    """The mean KL from the reference per token of a text, behind its prompt."""
    real = text.attention_mask[:, prefix_len:]

    def full_logprobs(model: HookedModel) -> Float[Tensor, "rows gen d_vocab"]:
        logits = model(text.tokens, attention_mask=torch.ones_like(text.tokens))
        return F.log_probs(logits[:, prefix_len - 1 : -1], temperature)

    with torch.no_grad():
        known = full_logprobs(exact_copy(reference))
    return _of_base_model(
        model, lambda model: F.masked_mean(F.kl_per_token(full_logprobs(model), known), real)
    )


def _of_base_model(
    model: HookedModel, function: Callable[[HookedModel], Float[Tensor, ""]]
) -> Target:
    def target(weights: ByWeight) -> Float[Tensor, ""]:
        first = next(model.parameters())
        own = {
            name.removeprefix("base_model."): weight.to(first)
            for name, weight in weights.items()
            if name.startswith("base_model.")
        }
        return with_weights(model, own, function)

    return target


def slope_of(target: Target, params: ByWeight) -> dict[str, Float[Tensor, "..."]]:
    """The gradient of a target by all weights that it depends on, in float64."""
    leaves = {name: exact(x).clone().requires_grad_() for name, x in params.items()}
    with torch.enable_grad():
        slopes = torch.autograd.grad(target(leaves), list(leaves.values()), allow_unused=True)
    found = zip(leaves, slopes, strict=True)
    return {name: slope for name, slope in found if slope is not None}
