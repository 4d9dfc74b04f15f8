"""A turned axis: below the floor that fits to halves of the same activations have."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.probes.direction import fit_direction
from rlhf_lab.probes.direction_probe import Split, _by_halves

D_MODEL, ANGLE = 16, math.radians(60)


def activations(
    n: int, angle: float, seed: int
) -> tuple[Float[Tensor, "n d_model"], Bool[Tensor, " n"]]:
    """Two classes, 3 standard deviations apart, along an axis turned off the first unit vector."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, D_MODEL, generator=generator)
    labels = torch.rand(n, generator=generator) > 0.5
    axis = torch.zeros(D_MODEL)
    axis[:2] = torch.tensor([math.cos(angle), math.sin(angle)])
    return x + 1.5 * (2 * labels.float() - 1)[:, None] * axis, labels


def floor_and_cosine(n: int, angle: float, method: str) -> tuple[float, float]:
    """The cosine of two halves after the turn, and that of fits before and after it."""
    (before, first), (after, labels) = activations(n, 0.0, 1), activations(n, angle, 2)
    split = Split(after[None, None], labels, after[None, None], labels)
    halves, _ = _by_halves(split, method)
    axes = (fit_direction(x, y, method).direction for x, y in ((before, first), (after, labels)))
    return halves["split_half_cosine"][0][0], torch.dot(*axes).item()


def test_a_turn_is_told_from_none_by_the_floor():
    floor, turned = floor_and_cosine(400, ANGLE, "mean")
    _, same = floor_and_cosine(400, 0.0, "mean")
    assert floor > 0.9
    assert abs(turned - math.cos(ANGLE)) < 0.1
    assert same > floor - 0.05


def test_the_floor_tells_where_a_cosine_is_no_news():
    """Discriminants of halves of few rows have nothing in common, those of many have."""
    few, _ = floor_and_cosine(36, 0.0, "lda")
    many, _ = floor_and_cosine(800, 0.0, "lda")
    assert few < 0.5 and many > 0.9
