"""Paired permutation test: whether two figures of the same sequences differ by more than chance."""

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.functional.masks import check_same_shape

__all__ = ["paired_permutation_test"]


def paired_permutation_test(
    a: Float[Tensor, " batch"],
    b: Float[Tensor, " batch"],
    draws: int = 2000,
    generator: torch.Generator | None = None,
) -> float:
    """Give the two-sided p-value of the mean difference of pairs.

    1. Take the difference of each pair; the mean of all of them is what was observed.
    2. Draw a sign for each pair, in each draw anew, by `torch.randint(2, (draws, batch),
       generator=generator)`, where 0 stands for -1: if a and b were alike, each difference could
       as well have had the other sign.
    3. Take the mean of the differences with the signs of each draw.
    4. Count the draws whose mean is at least as far from 0 as the observed one, where equal within
       1e-9 of it counts as equal. The observed one is a draw too: (1 + count) / (1 + draws).

    It is never below 1 / (1 + draws), and 1 for a single pair. Signs are the same every time unless
    a `generator` (of the CPU) is given. Computed on the CPU in float64. Raises ValueError if the
    shapes differ, for fewer than 100 draws, for nan, and if there is no pair.

    p = (1 + #{|mean s d| >= |mean d|}) / (1 + draws)    (Fisher 1935; Phipson and Smyth 2010)
    """
    check_same_shape(a=a, b=b)
    differences = a.detach().cpu().double() - b.detach().cpu().double()
    _check_pairs(differences, draws)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    signs = 2 * torch.randint(2, (draws, len(differences)), generator=generator) - 1
    means = (signs * differences).mean(1)
    reaches = means.abs() >= (1 - 1e-9) * differences.mean().abs()
    return (1 + reaches.sum().item()) / (1 + draws)


def _check_pairs(differences: Float[Tensor, " batch"], draws: int) -> None:
    """Refuse what has no p-value, in a sentence."""
    if draws < 100:
        raise ValueError(f"draws is {draws}; give at least 100, such as 2000.")
    if not len(differences):
        raise ValueError("there is no pair to compare; give at least one.")
    if differences.isnan().any():
        pairs = int(differences.isnan().sum())
        raise ValueError(f"a - b is nan in {pairs} of the pairs; leave those pairs out.")
