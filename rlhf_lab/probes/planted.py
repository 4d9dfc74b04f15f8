"""Planted truths: activations and weights made so that the right answer of a probe is known."""

import copy
import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.models.transformer_lens import HookedTransformer
from rlhf_lab.probes.weight_delta import as_matrix


def planted_classes(
    n: int, direction: Float[Tensor, " d_model"], distance: float, seed: int
) -> tuple[Float[Tensor, "n d_model"], Bool[Tensor, " n"]]:
    """Two Gaussian clouds of variance 1, their means `distance` apart along a direction.

    The best possible accuracy is `gaussian_accuracy(distance)`.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 2 == 0
    noise = torch.randn(n, len(direction), generator=generator)
    signs = torch.where(labels, 0.5, -0.5)[:, None]
    return noise + signs * distance * direction / direction.norm(), labels


def gaussian_accuracy(distance: float) -> float:
    """Phi(distance / 2): the accuracy of the best rule for two Gaussians of variance 1."""
    return 0.5 * (1 + math.erf(distance / 2 / math.sqrt(2)))


def with_planted_delta(
    model: HookedTransformer, parameter: str, rank: int, size: float, seed: int
) -> tuple[HookedTransformer, Float[Tensor, "rows cols"]]:
    """A copy of a model with a delta of known rank added to one parameter, and that delta.

    All singular values of the delta are equal, and its norm is `size`; it is given as a matrix, as
    `as_matrix` lays the parameter out. W_Q, W_K and W_V, whose layout that turns round, are
    refused.

    Raises ValueError for a parameter that the model does not have or that is refused.
    """
    planted = copy.deepcopy(model)
    weights = dict(planted.named_parameters())
    if parameter not in weights or parameter.endswith(("W_Q", "W_K", "W_V")):
        raise ValueError(f"parameter is {parameter!r}; choose a matrix such as 'unembed.W_U'.")
    weight = weights[parameter]
    rows, cols = as_matrix(parameter, weight.detach()).shape
    generator = torch.Generator().manual_seed(seed)
    left, _ = torch.linalg.qr(torch.randn(rows, rank, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(cols, rank, generator=generator, dtype=torch.float64))
    delta = (left @ right.T * size / math.sqrt(rank)).to(weight)
    with torch.no_grad():
        weight += delta.reshape(weight.shape)
    return planted, delta
