"""Gradients and activations as a probe is shown them."""

from torch import Tensor

from rlhf_lab.training import Context


def gradients_at(ctx: Context) -> dict[str, Tensor]:
    """The policy's gradients by name, between the backward pass and the step; else none."""
    if ctx.event != "after_backward":
        return {}
    weights = ctx.policy.named_parameters()
    return {name: weight.grad for name, weight in weights if weight.grad is not None}


def acts_at(acts: dict[str, Tensor], sites: list[str], pos: int | None) -> dict[str, Tensor]:
    """The activations of those sites that are there, at one position or at all."""
    there = {site: acts[site] for site in sites if site in acts}
    return {site: act if pos is None else act[:, pos] for site, act in there.items()}
