"""LEACE: numbers by hand, what it leaves, and what ablation leaves that it does not."""

import pytest
import torch

from rlhf_lab.probes.direction import ablate, fit_direction
from rlhf_lab.probes.erasure import fit_leace, orthogonal_eraser
from tests.probes.test_direction import read


def sheared(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two classes 2 apart along the first axis, whose noise is the same along both axes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 2 == 0
    noise = torch.randn(n, 2, generator=generator).double()
    x = torch.stack([noise[:, 0] + labels * 2.0, noise[:, 0] + 0.1 * noise[:, 1]], dim=1)
    return x, labels


def test_by_hand_in_two_dimensions():
    x = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]).double()
    labels = torch.tensor([True, True, False, False])
    eraser = fit_leace(x, labels, ridge=0.0)
    # means (1, 0) and (-1, 0): d = (2, 0); S = identity; w = S^-1 d / (d' S^-1 d) = (2, 0) / 4
    assert eraser.axis.tolist() == [2, 0] and eraser.reader.tolist() == [0.5, 0]
    assert eraser.erase(x).tolist() == [[0, 1], [0, -1], [0, 1], [0, -1]]


def test_it_takes_what_is_read_and_ablation_what_lies_along_the_axis():
    """A covariance of (2, 1; 1, 1.01), with means 2 apart along the first axis.

    S^-1 d is along (1.01, -1), so that LEACE reads the difference of both numbers, and moves along
    the first alone.
    """
    x, labels = sheared(4000, seed=0)
    eraser = fit_leace(x, labels)
    direction = eraser.reader / eraser.reader.norm()
    assert direction[1] / direction[0] == pytest.approx(-1, abs=0.02)
    assert abs(eraser.axis[1]) < 0.1 < 1.9 < eraser.axis[0]
    along = fit_direction(x, labels).direction
    torch.testing.assert_close(orthogonal_eraser(along).erase(x), ablate(x, along))
    assert read(x, labels, 2000, "lda") > 0.99
    for each in (ablate(x, along), eraser.erase(x)):
        assert abs(read(each, labels, 2000, "lda") - 0.5) < 0.05
    # what does not lie along the axis stays as it was, and less is moved than by ablation
    moved = [(each - x).square().sum() for each in (eraser.erase(x), ablate(x, along))]
    assert moved[0] < moved[1]


def test_a_token_that_is_always_the_same_is_left_as_it_is():
    x = torch.ones(6, 4)
    labels = torch.tensor([True, False] * 3)
    assert torch.equal(fit_leace(x, labels).erase(x), x.double())
