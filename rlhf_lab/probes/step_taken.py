"""Steps of the optimizer, copied before they are taken: weights, gradients and moments."""

import dataclasses
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.device import exact
from rlhf_lab.probes.step_influence import AdamSettings, ByWeight
from rlhf_lab.probes.step_ledger import BEFORE_THE_OBJECTIVE
from rlhf_lab.training import Overrides, RLHFTrainer


class BeforeStep(NamedTuple):
    """Copies of what a step starts from: weights, gradients before clipping, moments."""

    params: dict[str, Tensor]
    grads: dict[str, Tensor]
    m0: dict[str, Tensor]
    v0: dict[str, Tensor]
    number: int
    settings: dict[str, AdamSettings]


def before_step(policy: nn.Module, gradients: ByWeight, optimizer: Optimizer) -> BeforeStep:
    """Copy what a step of AdamW starts from, by the policy's names of its parameters.

    torch keeps the first moment of what it minimizes; where it maximizes, that is of the gradient
    with the other sign, which is turned here.
    """
    weights = dict(policy.named_parameters())
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    params, m0, v0, settings, numbers = {}, {}, {}, {}, {1}
    for name in gradients:
        weight, group = weights[name], groups[id(weights[name])]
        state = optimizer.state.get(weight, {})
        sign = -1 if group["maximize"] else 1
        nothing = exact(torch.zeros_like(weight, requires_grad=False))
        params[name] = weight.detach().clone()
        m0[name] = sign * exact(state["exp_avg"].clone()) if state else nothing
        v0[name] = exact(state["exp_avg_sq"].clone()) if state else nothing
        settings[name] = AdamSettings(
            float(group["lr"]), *group["betas"], group["eps"], group["weight_decay"]
        )
        if state:
            numbers.add(int(state["step"]) + 1)
    grads = {name: gradient.clone() for name, gradient in gradients.items()}
    return BeforeStep(params, grads, m0, v0, max(numbers), settings)


def moved_weights(policy: nn.Module, before: ByWeight) -> dict[str, Float[Tensor, "..."]]:
    """By how much the weights have moved since, in float64."""
    now = dict(policy.named_parameters())
    return {name: exact(now[name].detach()) - exact(x) for name, x in before.items()}


def refuse_other_steps(name: str, trainer: RLHFTrainer) -> None:
    """Raise ConfigError for a run whose steps are not those of one AdamW in float32."""
    args, optimizer = trainer.args, trainer.optimizer
    refused = {
        "optimizer='adamw_8bit'": args.optimizer == "adamw_8bit",
        "optimizer_in_backward=True": args.optimizer_in_backward,
        "parallel='fsdp'": args.parallel == "fsdp",  # moments are shards
        f"weight_precision={args.weight_precision!r}": args.weight_precision != "fp32",
    }
    for setting, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"{setting} makes steps that {name} cannot take apart; leave it at its default, or "
                "the probe out."
            )
    groups = optimizer.param_groups
    if type(optimizer) is not AdamW or any(group["amsgrad"] for group in groups):
        raise ConfigError(
            f"{name} takes steps of AdamW apart, and the optimizer is {type(optimizer).__name__}, "
            "or one with amsgrad; leave the probe out."
        )
    replaceable = {f.name for f in dataclasses.fields(Overrides)} - set(BEFORE_THE_OBJECTIVE)
    given = sorted(replaceable & set(trainer.custom_components))
    if given:
        raise ConfigError(
            f"{given[0]} is the caller's own, and {name} knows the shares of the package's "
            "functions only; leave one of the two out."
        )
