"""Readings of value by layer: linear readers of a target, and the tuned lens beside the raw one."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.probes.policy_value import correlation_with
from rlhf_lab.probes.probe import RESAMPLES, decimals, interval_fields
from rlhf_lab.probes.tuned_lens import (
    Affine,
    best_ridge,
    fit_translator,
    ridge_errors,
    spread_over,
)
from rlhf_lab.probes.value_lens import (
    HeldOutFit,
    held_out_fits,
    r2_interval,
    r_squared,
    value_lens,
)

_Fields = dict[str, Any]
_Tensors = dict[str, Tensor]


class ReadTarget(NamedTuple):
    """What readers are to read.

    Args:
        mask: where it is defined.
        names: of its positions.
        against: whose value it is.
    """

    value: Float[Tensor, "batch pos"]
    mask: Bool[Tensor, "batch pos"]
    names: list[str]
    against: str


def read_target(
    residuals: Float[Tensor, "site batch seq d_model"],
    own: Float[Tensor, "batch seq"],
    target: ReadTarget,
    ridge: float | None,
    pooled: bool,
) -> tuple[_Fields, _Tensors]:
    """R2 of ridge regressions by site and position, and the head's correlation with the target.

    1. Choose the penalty on the fitted two thirds of the sequences alone, unless it is given.
    2. Fit, and take R2 on the last third.

    Args:
        own: the model's own values.
        pooled: all positions are one.
    """
    value, mask = target.value.to(residuals.device), target.mask.to(residuals.device)
    cut, tensors = 2 * len(value) // 3, {}
    if ridge is None:
        fit = value[:cut, :, None], mask[:cut], pooled
        some = spread_over(len(residuals))
        errors = torch.stack([ridge_errors(residuals[at, :cut], *fit) for at in some])
        ridge, tensors = best_ridge(errors), {"ridge_errors": errors}
    fits = held_out_fits(residuals, value, mask, ridge, pooled)
    r2, defined = (torch.stack(p) for p in zip(*(r_squared(*fit) for fit in fits), strict=True))
    held = len(value) - cut
    fields = {
        "slots": target.names,
        "r2_against": target.against,
        "ridge": ridge,
        "r2": decimals(r2, 4),
        "defined": defined.tolist(),
        "held_out": held,
        **interval_fields("r2", r2_interval(fits, held)),
    }
    if not pooled:
        found = correlation_with(own, value, mask, resamples=RESAMPLES)
        fields |= {"head_correlation": decimals(found.value, 4), "head_n": len(value)}
        fields |= interval_fields("head_correlation", found)
    return fields, tensors


def read_translated(
    policy: TransformerWithValueHead,
    sites: list[str],
    residuals: Float[Tensor, "site batch seq d_model"],
    own: Float[Tensor, "batch seq"],
    mask: Bool[Tensor, "batch seq"],
    ridge: float | None,
) -> tuple[dict[str, Affine], _Fields, _Tensors]:
    """Return translators by site, and R2 of the raw and the tuned lens with the model's own value.

    Affine maps to the last residual are fitted on two thirds of the sequences, all positions
    together, with a penalty chosen there unless given; R2 is of the last third.
    """
    cut, tensors = 2 * len(own) // 3, {}
    early = [at for at in spread_over(len(sites)) if at != len(sites) - 1]
    fit = [(residuals[at, :cut], residuals[-1, :cut], mask[:cut]) for at in early]
    if ridge is None:
        errors = torch.stack([ridge_errors(*rows, pooled=True) for rows in fit])
        ridge, tensors = best_ridge(errors), {"tuned_ridge_errors": errors}
    found = [fit_translator(*rows, ridge) for rows in fit]
    held = residuals[early, cut:]
    lenses = {
        "raw": value_lens(policy, held),
        "tuned": value_lens(policy, torch.stack([f(x) for f, x in zip(found, held, strict=True)])),
    }
    translators = dict(zip([sites[at] for at in early], found, strict=True))
    fields: _Fields = {"tuned_sites": list(translators), "tuned_ridge": ridge}
    fields |= {"lens_held_out": len(own) - cut}
    for name, lens in lenses.items():
        fields |= _agreement(f"{name}_r2", lens, own[cut:], mask[cut:])
    return translators, fields, tensors


def _agreement(
    name: str,
    lens: Float[Tensor, "site batch seq"],
    own: Float[Tensor, "batch seq"],
    mask: Bool[Tensor, "batch seq"],
) -> _Fields:
    whole = own.flatten()[None], mask.flatten()[None]
    fits = [HeldOutFit(read.flatten()[None], *whole) for read in lens]
    r2 = torch.stack([r_squared(*fit)[0] for fit in fits])
    ends = interval_fields(name, r2_interval(fits, len(own)))
    return {name: decimals(r2[:, 0], 4)} | {end: [x[0] for x in xs] for end, xs in ends.items()}
