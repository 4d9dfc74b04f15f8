"""Ablation and patching of heads by hand."""

import pytest
import torch

from rlhf_lab.diffing import ablate_heads, patch_heads
from rlhf_lab.errors import ConfigError


@pytest.fixture
def z():
    """Two rows, three positions, two heads of one entry: row 0 is 0 to 5, row 1 is 10 to 15."""
    return torch.arange(6.0).reshape(1, 3, 2, 1) + torch.tensor([0.0, 10.0])[:, None, None, None]


def numbers(z):
    return z[..., 0].flatten(1).tolist()


@pytest.mark.usefixtures("no_type_checks")
def test_ablation_by_hand(z):
    """Head 1 at the last two positions; both heads at position 1, whose means are 7 and 8."""
    found = ablate_heads(z, [1], slice(1, 3), "zero")
    assert numbers(found) == [[0, 1, 2, 0, 4, 0], [10, 11, 12, 0, 14, 0]]
    assert numbers(z) == [[0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15]]
    found = ablate_heads(z, [0, 1], slice(1, 2), "mean")
    assert numbers(found) == [[0, 1, 7, 8, 4, 5], [10, 11, 7, 8, 14, 15]]
    with pytest.raises(ConfigError, match="to='median' is unknown; choose zero or mean"):
        ablate_heads(z, [0], slice(0, 1), "median")


def test_a_patch_by_hand(z):
    """Head 0 at positions 0 and 1, from a donor whose entries are those of z plus 100."""
    found = patch_heads(z, z + 100, [0], slice(0, 2))
    assert numbers(found) == [[100, 1, 102, 3, 4, 5], [110, 11, 112, 13, 14, 15]]
    assert numbers(z) == [[0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15]]
