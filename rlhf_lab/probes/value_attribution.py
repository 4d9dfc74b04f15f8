"""Value attribution: what makes values of one slot differ, an exact sum over parts of the model."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.device import exact
from rlhf_lab.models.value_head import ValueHead

LEAST_STEP = 1e-12  # of a hidden unit's input, in float64: below, the secant is the slope


class ValueRows(NamedTuple):
    """How the value of each state differs from that of an origin, part by part.

    Args:
        rows: what each part's deviation from the origin adds; they sum to value less base.
        on: the hidden units that are on in each state; none in a dead head.
        value: of each state.
        base: of the origin.
    """

    rows: Float[Tensor, "component n"]
    on: Bool[Tensor, "n hidden"]
    value: Float[Tensor, " n"]
    base: Float[Tensor, ""]


@torch.no_grad()
def secant_value_rows(
    head: nn.Module,
    parts: Float[Tensor, "component n d_model"],
    origin: Float[Tensor, "component d_model"],
) -> ValueRows:
    """Split a value head's output exactly over the parts that sum to its input, in float64.

    The integral of a ReLU's slope along the straight line from the origin is the secant, so a
    part's row is its deviation from the origin through the secants; a part equal in all states has
    0.

    Args:
        parts: such as each head's output, centered and divided by the final norm's scale.
        origin: state to compare with, such as the mean of each part over the states of a slot.

    row_c = sum_j w2_j (relu(p_j) - relu(p0_j)) / (p_j - p0_j) <W1_j, k_c - k0_c>
    (integrated gradients: Sundararajan et al. 2017, arXiv 1703.01365, in closed form)

    Raises:
        ConfigError: If the head is not two linear layers with a ReLU between.
    """
    refuse_other_heads(head)
    first, _, last = head
    weight, bias = exact(first.weight), exact(first.bias)
    out = exact(last.weight)[0]
    constant = exact(last.bias)[0]
    parts, origin = exact(parts), exact(origin)
    here, there = parts.sum(0) @ weight.T + bias, origin.sum(0) @ weight.T + bias
    step, rise = here - there, here.relu() - there.relu()
    moved = step.abs() > LEAST_STEP
    slopes = torch.where(moved, rise / torch.where(moved, step, 1.0), (there > 0).to(here))
    rows = torch.einsum("cnd,nd->cn", parts - origin[:, None], (slopes * out) @ weight)
    value, base = (x.relu() @ out + constant for x in (here, there))
    return ValueRows(rows, here > 0, value, base)


def refuse_other_heads(head: nn.Module) -> None:
    """Raise ConfigError for a value head that is not two linear layers with a ReLU between."""
    layers = [head[i] for i in range(3)] if isinstance(head, ValueHead) else []
    kinds = (nn.Linear, nn.ReLU, nn.Linear)
    if len(layers) != 3 or not all(map(isinstance, layers, kinds)):
        raise ConfigError(
            f"value_head is a {type(head).__name__}, and value_attribution reads two linear layers "
            "with a ReLU between; leave the probe out, or use make_value_head's."
        )
