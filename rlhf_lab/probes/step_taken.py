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
    """Weights, gradients before clipping, and moments before a step; arguments of `adam_step`."""

    params: dict[str, Tensor]
    grads: dict[str, Tensor]
    m0: dict[str, Tensor]
    v0: dict[str, Tensor]
    number: int
    settings: dict[str, AdamSettings]


def before_step(policy: nn.Module, gradients: ByWeight, optimizer: Optimizer) -> BeforeStep:
    """Copy the state before a step of AdamW, by the policy's names of its parameters.

    With maximize=True, torch's first moment has the other sign, which is undone here.
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
    """Return the change of the weights, in float64."""
    now = dict(policy.named_parameters())
    return {name: exact(now[name].detach()) - exact(x) for name, x in before.items()}


def validate_adamw(name: str, trainer: RLHFTrainer) -> None:
    """Raise ConfigError for a run whose steps are not those of one AdamW in float32."""
    args, optimizer = trainer.args, trainer.optimizer
    replaceable = {f.name for f in dataclasses.fields(Overrides)} - set(BEFORE_THE_OBJECTIVE)
    custom = sorted(replaceable & set(trainer.custom_components))
    is_adamw = type(optimizer) is AdamW and not any(g["amsgrad"] for g in optimizer.param_groups)
    unsupported = {
        "optimizer='adamw_8bit'": args.optimizer == "adamw_8bit",
        "optimizer_in_backward=True": args.optimizer_in_backward,
        "parallel='fsdp'": args.parallel == "fsdp",  # moments are shards
        f"weight_precision={args.weight_precision!r}": args.weight_precision != "fp32",
        f"optimizer {type(optimizer).__name__}, or one with amsgrad,": not is_adamw,
        f"custom {', '.join(custom)}": bool(custom),
    }
    for setting, is_set in unsupported.items():
        if is_set:
            raise ConfigError(
                f"{setting} cannot be combined with {name}, which splits steps of AdamW in fp32. "
                "Use the default, or remove the probe."
            )
