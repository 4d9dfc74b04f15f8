"""The value function loss: squared error of values against returns, with optional clipping."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.functional.masks import (
    Denominator,
    at_least_float32,
    check_same_shape,
    masked_mean,
    zero_masked,
)

__all__ = ["calc_value_function_loss"]


def calc_value_function_loss(
    values: Float[Tensor, "batch gen"],
    returns: Float[Tensor, "batch gen"],
    vf_coef: float,
    mask: Bool[Tensor, "batch gen"] | None = None,
    old_values: Float[Tensor, "batch gen"] | None = None,
    clip: float | None = None,
    denominator: Denominator = None,
) -> Float[Tensor, ""]:
    """Average half the squared error of the values over the real tokens, times its coefficient.

    1. Blank the inputs at masked tokens.
    2. Square the distance between value and return.
    3. If `clip` is given, also square it with the value held within `clip` of the old value, and
       take the larger of the two at each token.
    4. Average over the real tokens, and multiply by vf_coef / 2.

    The loss is subtracted from the objective. `denominator` as in `masked_mean`. Half-precision
    input is turned into float32 first, since squares overflow in it. Raises ValueError if `clip` is
    given without `old_values` or is negative, or if the mask has another shape.

    vf_coef / 2 * mean_t (V(s_t) - R_t)^2   (Schulman et al. 2017, equation 9), and with clip
    vf_coef / 2 * mean_t max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2)   (PPO2's code)
    """
    check_same_shape(values=values, returns=returns, old_values=old_values, mask=mask)
    values = zero_masked(at_least_float32(values), mask)
    returns = zero_masked(at_least_float32(returns), mask)
    squared_error = (values - returns).square()
    if clip is not None:
        if old_values is None or clip < 0:
            raise ValueError(
                f"clip is {clip} and old_values is {'missing' if old_values is None else 'given'}; "
                "clipping needs the values of the rollout and a clip of at least 0."
            )
        old_values = zero_masked(at_least_float32(old_values), mask)
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        squared_error = torch.maximum(squared_error, (clipped - returns).square())
    return 0.5 * vf_coef * masked_mean(squared_error, mask, denominator=denominator)
