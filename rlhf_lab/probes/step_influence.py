"""One step of AdamW in parts, and the groups of the weights that it changes."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from rlhf_lab.diffing.groups import Groups, coarse_groups, fine_groups
from rlhf_lab.models import TransformerWithValueHead, lora_layers
from rlhf_lab.models.device import exact
from rlhf_lab.models.lora import MARK

ByWeight = Mapping[str, Float[Tensor, "..."]]  # by name of the weight


class AdamSettings(NamedTuple):
    """Settings of AdamW for one parameter."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class AdamStep(NamedTuple):
    """One step of AdamW up the gradient in parts, by weight."""

    delta: ByWeight  # change of each weight
    D: ByWeight  # change per unit of the first moment
    momentum: ByWeight  # part of delta by earlier gradients
    decay: ByWeight  # part of delta by weight decay
    slope: ByWeight  # derivative of delta by the clipped gradient, including the denominator's
    kappa: float  # clipping factor of the gradient
    norm: float  # of the whole gradient, before clipping


class BeforeStep(NamedTuple):
    """Arguments of `adam_step`, all from before the step; gradients before clipping."""

    params: dict[str, Tensor]
    grads: dict[str, Tensor]
    m0: dict[str, Tensor]
    v0: dict[str, Tensor]
    number: int
    settings: dict[str, AdamSettings]


def adam_step(
    params: ByWeight,
    grads: ByWeight,
    m0: ByWeight,
    v0: ByWeight,
    step: int,
    group_settings: Mapping[str, AdamSettings],
    max_norm: float | None,
) -> AdamStep:
    """Recompute one step of AdamW, in float64, in parts that sum to it.

    D is held at its actual value, so the step is linear in the gradient.

    kappa  = min(1, max_norm / (|g| + 1e-6))
    v      = b2 v0 + (1 - b2) (kappa g)^2
    D      = lr / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)
    delta  = D (b1 m0 + (1 - b1) kappa g) - lr wd theta   (Loshchilov and Hutter 2019, algorithm 2)

    Args:
        grads: of the maximized objective, before clipping.
        m0, v0: moments before the step; m0 of the maximized objective (torch's has the other sign).
        step: number of this step, from 1.
        group_settings: of each parameter.
        max_norm: None for no limit.
    """
    norm = torch.linalg.vector_norm(torch.stack([exact(g).norm() for g in grads.values()])).item()
    kappa = 1.0 if max_norm is None or norm <= max_norm else max_norm / (norm + 1e-6)
    parts: dict[str, list[Tensor]] = {}
    for name, grad in grads.items():
        lr, beta1, beta2, eps, weight_decay = group_settings[name]
        clipped, first, second = kappa * exact(grad), exact(m0[name]), exact(v0[name])
        root = (beta2 * second + (1 - beta2) * clipped.square()).div(1 - beta2**step).sqrt()
        D = lr / (1 - beta1**step) / (root + eps)
        climbed = D * (beta1 * first + (1 - beta1) * clipped)
        decay = -lr * weight_decay * exact(params[name])
        # d root / d clipped; a root of 0 has a gradient of 0, and the step is 0 there
        steeper = (1 - beta2) * clipped / (1 - beta2**step) / root.clamp(min=1e-300)
        slope = D * (1 - beta1) - climbed * steeper / (root + eps)
        parts[name] = [climbed + decay, D, beta1 * D * first, decay, slope]
    columns = [{name: part[i] for name, part in parts.items()} for i in range(5)]
    return AdamStep(*columns, kappa=kappa, norm=norm)


def before_step(policy: nn.Module, gradients: ByWeight, optimizer: Optimizer) -> BeforeStep:
    """Copy the state before a step of AdamW, by the policy's names of its parameters."""
    weights, number = dict(policy.named_parameters()), 1
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    params, m0, v0, settings = {}, {}, {}, {}
    for name in gradients:
        weight, group = weights[name], groups[id(weights[name])]
        state, zero = optimizer.state.get(weight, {}), torch.zeros_like(weight.detach())
        # with maximize=True, torch's first moment has the other sign
        sign = -1 if group["maximize"] else 1
        params[name] = weight.detach().clone()
        m0[name] = sign * state.get("exp_avg", zero)
        v0[name] = state.get("exp_avg_sq", zero).clone()
        settings[name] = AdamSettings(
            float(group["lr"]), *group["betas"], group["eps"], group["weight_decay"]
        )
        number = max(number, int(state.get("step", 0)) + 1)
    grads = {name: gradient.clone() for name, gradient in gradients.items()}
    return BeforeStep(params, grads, m0, v0, number, settings)


def row_direction(
    step: AdamStep, gradient: ByWeight, group_settings: Mapping[str, AdamSettings]
) -> dict[str, Tensor]:
    """Return p such that <p, g_token> is a token's part of a target's slope along the step.

    p = (1 - b1) kappa D grad f
    """
    return {
        name: (1 - group_settings[name].beta1) * step.kappa * step.D[name] * slope
        for name, slope in gradient.items()
    }


def left_out_direction(step: AdamStep, gradient: ByWeight, grads: ByWeight) -> dict[str, Tensor]:
    """Return the direction q along which a sample's shares change by the effect of leaving it out.

    To first order, through numerator, second moment and clipping.

    q = kappa s - (kappa / (|g| (|g| + 1e-6))) <s, g> g, the second part if the gradient is clipped;
    s = slope grad f
    """
    s = {name: step.slope[name] * slope for name, slope in gradient.items()}
    q = {name: step.kappa * slope for name, slope in s.items()}
    if step.kappa == 1:
        return q
    factor = inner(s, grads) * step.kappa / (step.norm * (step.norm + 1e-6))
    return {name: q.get(name, 0.0) - factor * exact(grad) for name, grad in grads.items()}


def inner(one: ByWeight, other: ByWeight) -> float:
    """Return <one, other> over the weights of the first, in float64."""
    return sum((exact(x) * exact(other[name])).sum().item() for name, x in one.items())


def trained_groups(policy: TransformerWithValueHead, fine: bool = True) -> Groups:
    """Return groups of the transformer's trained parameters, by the policy's names of them.

    They are `fine_groups` or `coarse_groups`. Adapters belong to the layer whose weight they
    change, and are coarse, since A serves all heads.
    """
    model = policy.base_model
    grouped = fine_groups(model) if fine and not lora_layers(model) else coarse_groups(model)
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    found = {
        name: [
            (f"base_model.{weight}", head)
            for weight in trained
            for part, head in parts
            if part == _effective_name(weight)
        ]
        for name, parts in zip(grouped.names, grouped.parts, strict=True)
    }
    found = {name: parts for name, parts in found.items() if parts}
    return Groups(list(found), list(found.values()))


def _effective_name(name: str) -> str:
    """Return the name of the weight that a parameter is, or that an adapter changes."""
    module, _, rest = name.partition(MARK)
    return f"{module}.{rest.split('.')[0]}" if rest else name


class _Caller(nn.Module):
    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, function: Callable[[Any], Any]) -> Any:
        return function(self.policy)


def with_weights(policy: nn.Module, weights: ByWeight, function: Callable[[Any], Any]) -> Any:
    """Call a function with a model that has other weights during the call."""
    named = {f"policy.{name}": weight for name, weight in weights.items()}
    return functional_call(_Caller(policy), named, (function,))
