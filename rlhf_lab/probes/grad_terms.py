"""GradTerms: gradients of the objective's four terms, by part of the model, and how they agree."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rlhf_lab.diffing.groups import Groups, coarse_groups, fine_groups, sum_by_group
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead, lora_layers
from rlhf_lab.models.device import exact
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.models.lora import MARK
from rlhf_lab.probes.probe import Check, Observation, Probe, Record
from rlhf_lab.probes.step_influence import ByWeight
from rlhf_lab.training import Objective, ReplayMinibatch, objective_terms

# fields of `ObjectiveTerms`, in the order of the stored rows
GRADIENT_TERMS = ("clipped_surrogate", "value_loss", "entropy_bonus", "kl_penalty")
TERM_SIGNS = (1.0, -1.0, 1.0, -1.0)  # of the terms in the objective
SUM_ROUNDING = {"fp32": 3e-5, "tf32": 1e-2, "bf16": 5e-2}


def term_gradients(
    policy: TransformerWithValueHead,
    reference: HookedModel,
    minibatch: ReplayMinibatch,
    objective: Objective,
    kl_coef: float,
) -> list[dict[str, Tensor]]:
    """Return the gradient of each signed term of the objective by all trained weights."""
    weights = {n: p for n, p in policy.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        terms = objective_terms(policy, reference, minibatch, objective, kl_coef)
        found = []
        for name, sign in zip(GRADIENT_TERMS, TERM_SIGNS, strict=True):
            term = getattr(terms, name)
            slopes = [None] * len(weights)
            if term.requires_grad:
                slopes = torch.autograd.grad(
                    sign * term, list(weights.values()), retain_graph=True, allow_unused=True
                )
            named = zip(weights.items(), slopes, strict=True)
            found.append({n: torch.zeros_like(p) if g is None else g for (n, p), g in named})
    return found


def gradient_products(
    gradients: list[dict[str, Tensor]], groups: Groups
) -> Float[Tensor, "term term group"]:
    """Return <g_a, g_b> of every two terms within every group, in float64."""
    inner = lambda a, b: sum_by_group({n: exact(x) * exact(b[n]) for n, x in a.items()}, groups)
    return torch.stack([torch.stack([inner(a, b) for b in gradients]) for a in gradients])


def cosines_of(products: Float[Tensor, "term term group"]) -> Float[Tensor, "term term group"]:
    """Return cosines between terms within groups; 0 if one of the two has no gradient."""
    norms = products.diagonal(dim1=0, dim2=1).T.clamp(min=0).sqrt()
    size = norms[:, None] * norms[None]
    return torch.where(size > 0, products / size.clamp(min=1e-300), 0.0)


def policy_groups(
    policy: TransformerWithValueHead, fine: bool = True, heads: bool = True
) -> Groups:
    """Return a partition of the trained parameters, by the policy's names of them.

    Those of the transformer are `fine_groups` or `coarse_groups`; with adapters, which belong to
    the layer whose weight they change, they are coarse, since A serves all heads. With `heads`, the
    value head and a separate critic are groups as well.
    """
    model = policy.base_model
    adapted = bool(lora_layers(model))
    grouped = fine_groups(model) if fine and not adapted else coarse_groups(model)
    found: dict[str, list[tuple[str, int | None]]] = {}
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    for name, parts in zip(grouped.names, grouped.parts, strict=True):
        for weight in trained:
            kept = [head for part, head in parts if part == effective_name(weight)]
            found.setdefault(name, []).extend((f"base_model.{weight}", head) for head in kept)
    for name in ("value_head", "critic") if heads else ():
        part = getattr(policy, name, None)
        weights = part.named_parameters() if isinstance(part, nn.Module) else ()
        found[name] = [(f"{name}.{n}", None) for n, weight in weights if weight.requires_grad]
    found = {name: parts for name, parts in found.items() if parts}
    return Groups(list(found), list(found.values()))


def effective_name(name: str) -> str:
    """Return the name of the weight that a parameter is, or that an adapter changes."""
    if MARK not in name:
        return name
    module, rest = name.split(MARK)
    return f"{module}.{rest.split('.')[0]}"


class GradTerms(Probe):
    """Gradients of each term of the objective by component: their norms, and cosines between them.

    The terms are surrogate, value loss, entropy bonus and KL penalty, with their signs. With a
    separate critic the value loss has a gradient there only.

    Checks: the four gradients sum to the gradient of the trainer.

    Args:
        step: "first" or "last" of the phase.
    """

    name = "grad_terms"
    question = "Do the terms of the objective agree or conflict, by component?"
    caveat = "Gradients are compared before Adam rescales them."
    events = ("after_backward",)
    step = "first"
    every = 5
    options = ("step", *Probe.options)

    def check_run(self, trainer: Any) -> None:
        if trainer.args.optimizer_in_backward:
            raise ConfigError(
                f"optimizer_in_backward=True cannot be combined with {self.name}, which needs "
                "whole gradients. Set optimizer_in_backward=False."
            )

    def observe(self, seen: Observation) -> Record:
        ctx = seen.ctx
        groups = policy_groups(ctx.policy, fine=False)
        settings = ctx.minibatch, seen.objective, ctx.kl_coef
        gradients = term_gradients(ctx.policy, ctx.reference, *settings)
        products = gradient_products(gradients, groups)
        whole = products.sum(-1, keepdim=True)
        products = torch.cat([products, whole], -1)
        norms = products.diagonal(dim1=0, dim2=1).T.clamp(min=0).sqrt()
        squares = [exact(g).square().sum().item() for g in seen.gradients.values()]
        values = {
            "step": ctx.step,
            "steps": seen.args.num_minibatches * seen.args.batches_per_learning_phase,
            "terms": list(GRADIENT_TERMS),
            "groups": [*groups.names, "all"],
            "grad_norm": sum(squares) ** 0.5,
        }
        tensors = {"norms": norms.float().cpu(), "cosines": cosines_of(products).float().cpu()}
        summed = lambda: Check.at_most(
            "the gradients of the terms sum to the trainer's",
            _sum_gap(gradients, seen.gradients),
            SUM_ROUNDING[seen.args.rounding],
        )
        return Record(values, tensors, [summed])


def _sum_gap(gradients: list[dict[str, Tensor]], expected: ByWeight) -> float:
    apart = size = 0.0
    for name, gradient in expected.items():
        total = sum(exact(of_term[name]) for of_term in gradients)
        apart += (total - exact(gradient)).square().sum().item()
        size += exact(gradient).square().sum().item()
    return (apart / max(size, 1e-300)) ** 0.5
