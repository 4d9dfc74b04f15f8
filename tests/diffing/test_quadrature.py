"""Gauss and Legendre's nodes: exact for polynomials, by hand for two."""

import pytest

from rlhf_lab.diffing.quadrature import quadrature
from rlhf_lab.errors import ConfigError


def test_two_nodes_by_hand_and_polynomials_exactly():
    """Two nodes at 1/2 -+ 1/sqrt(12), each with half the weight."""
    at, weights = quadrature(2)
    assert at == pytest.approx([0.2113248654, 0.7886751346]) and weights == [0.5, 0.5]
    at, weights = quadrature(8)
    assert sum(w * a**15 for a, w in zip(at, weights, strict=True)) == pytest.approx(1 / 16)
    assert sum(w * a**16 for a, w in zip(at, weights, strict=True)) != pytest.approx(
        1 / 17, rel=1e-12
    )
    with pytest.raises(ConfigError, match="nodes=0 is out of range"):
        quadrature(0)
