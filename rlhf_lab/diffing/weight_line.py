"""Straight line of weights between two models, and integrals of gradients along it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.func import functional_call

from rlhf_lab.diffing.contrast import Words, make_contrast
from rlhf_lab.diffing.groups import Groups, check_partition, restrict, weights_of_both
from rlhf_lab.models import merged_copy
from rlhf_lab.models.hooked_model import HookedModel, model_where_exact
from rlhf_lab.models.padding import run_left_padded
from rlhf_lab.torch_modes import differentiable_attention

NODES = 8  # enough between a model and its fine-tuned form
MAX_NODES = 32  # to which they double until a sum is complete


class WeightLine:
    """All weights between two models of one architecture, adapters merged, without hooks.

    On a device without float64 everything is on the CPU. Neither model is changed.

    Args:
        in_float64: convert weights and activations to float64; if False, keep the first model's
            dtype.

    Attributes:
        before, after, delta: weights by name, and their difference.

    Raises:
        ConfigError: If the models do not have the same parameters.
    """

    def __init__(self, model0: HookedModel, model1: HookedModel, in_float64: bool = False) -> None:
        model0, model1 = model_where_exact(model0), model_where_exact(model1)
        self.before, self.after = weights_of_both(model0, model1)
        self.model = merged_copy(model0)
        if in_float64:
            self.model.to(torch.float64, print_details=False)
            self.before, self.after = (
                {name: weight.double() for name, weight in weights.items()}
                for weights in (self.before, self.after)
            )
        self.delta = {name: self.after[name] - self.before[name] for name in self.before}

    def at(self, alpha: float) -> dict[str, Float[Tensor, "..."]]:
        """Return all weights at a fraction of the line; at 0 and 1 bitwise those of the models."""
        return {name: torch.lerp(self.before[name], self.after[name], alpha) for name in self.after}

    def logits(
        self,
        weights: dict[str, Float[Tensor, "..."]],
        tokens: Int[Tensor, "batch seq"],
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, "batch seq d_vocab"]:
        """Return the logits of a text with these weights, in float64.

        Args:
            attention_mask: False on left padding.
        """

        def run(rows: Int[Tensor, "batch seq"]) -> tuple[Tensor, ...]:
            mask = {"attention_mask": torch.ones_like(rows)}
            return (functional_call(self.model, weights, (rows,), mask),)

        device = next(self.model.parameters()).device
        mask = None if attention_mask is None else attention_mask.to(device)
        return run_left_padded(run, tokens.to(device), mask)[0].double()


def quadrature(nodes: int = NODES) -> tuple[list[float], list[float]]:
    """Return the nodes between 0 and 1 of Gauss-Legendre quadrature, and weights that sum to 1.

    n nodes integrate polynomials of degree up to 2n - 1 exactly.

    Source: Gauss 1814; Press et al. 2007, "Numerical Recipes", section 4.6
    """
    at, weights = np.polynomial.legendre.leggauss(nodes)
    return ((at + 1) / 2).tolist(), (weights / 2).tolist()


def integrate(
    derivative: Callable[[float], Tensor], whole: Tensor, allowed: float | Tensor, nodes: int
) -> Tensor:
    """Integrate from 0 to 1, and double the nodes while the sum of the rows misses the whole."""
    while True:
        at, weights = quadrature(nodes)
        rows = sum(weight * derivative(node) for node, weight in zip(at, weights, strict=True))
        if (rows.sum(0) - whole).abs().max() <= allowed or 2 * nodes > MAX_NODES:
            return rows
        nodes *= 2


def derivatives_along(
    function: Callable[[Any], Tensor],
    weights: Mapping[str, Float[Tensor, "..."]],
    directions: Sequence[Mapping[str, Float[Tensor, "..."]]],
) -> Float[Tensor, "*shape"]:
    """Return the derivatives of each value of a function along directions of some of the weights.

    Each is the derivative of <direction, J' u> by u, with J that of the function by the weights
    (the double-backward trick), so that one graph serves all directions.
    """
    leaves = {name: x.detach().requires_grad_() for name, x in weights.items()}
    with torch.enable_grad(), differentiable_attention():
        values = function(leaves)
        u = torch.ones_like(values, requires_grad=True)
        slopes = torch.autograd.grad(
            values, list(leaves.values()), u, create_graph=True, allow_unused=True
        )
        known = {n: x for n, x in zip(leaves, slopes, strict=True) if x is not None}
        found = []
        for direction in directions:
            pairs = [(known[name], x) for name, x in direction.items() if name in known]
            along = sum(((slope * x.to(slope)).sum() for slope, x in pairs), start=0 * u.sum())
            found.append(torch.autograd.grad(along, u, retain_graph=True)[0].detach())
    return torch.stack(found)


@torch.no_grad()
def shift_by_weights(
    model0: HookedModel,
    model1: HookedModel,
    tokens: Int[Tensor, "batch seq"],
    pos: int,
    words: Words,
    groups: Groups,
    nodes: int = NODES,
) -> Float[Tensor, "group batch"]:
    """Attribute the shift of a logit difference to the groups of weights that changed.

    1. Move all weights in a straight line from the first model to the second.
    2. Differentiate the logit difference along the change of each group at each node of the
       quadrature, which gives a value for each text.
    3. Double the nodes while the groups miss the shift by more than 1e-3 of it, up to `MAX_NODES`.

    phi_g = int_0^1 <grad f(theta_0 + a delta), delta_g> da
    (integrated gradients: Sundararajan et al. 2017, arXiv 1703.01365; along weights)

    Args:
        tokens: texts of one length, without padding.
        pos: the position before the words.

    Raises:
        ConfigError: If the models differ in parameters, or the groups are not a partition.
    """
    line = WeightLine(model0, model1)
    check_partition(groups, line.before)
    end = range(tokens.shape[1])[pos] + 1
    tokens, contrast = tokens[:, :end], make_contrast(model0, words)
    changes = [restrict(line.delta, groups, name) for name in groups.names]

    def difference(weights: dict[str, Tensor]) -> Float[Tensor, " batch"]:
        return contrast.of(line.logits(weights, tokens)[:, -1])

    shift = difference(line.after) - difference(line.before)
    allowed = 1e-3 * max(1.0, shift.abs().max().item())
    differentiate = lambda node: derivatives_along(difference, line.at(node), changes)
    return integrate(differentiate, shift, allowed, nodes)
