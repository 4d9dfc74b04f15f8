"""Principal subspaces: shares worked by hand, planted changes, and what chance gives."""

import math

import pytest
import torch

from rlhf_lab.diffing.principal import (
    Factored,
    chance_share,
    energy_blocks,
    head_products,
    principal_spaces,
    product_spaces,
    random_factor_shares,
    random_shares,
)
from rlhf_lab.models import effective_weights, load_model

DIAGONAL = torch.tensor([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0]])


def test_shares_by_hand():
    """Of diag(3, 2) with a column of 0, the first singular vectors are the first unit vectors."""
    spaces = principal_spaces(DIAGONAL, 1)
    assert spaces.left.abs().flatten().tolist() == [1, 0]
    assert spaces.right.abs().flatten().tolist() == [1, 0, 0]
    # squares 1, 4, 9 in the first row and 16, 25, 36 in the second: 91 in all
    delta = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    blocks = energy_blocks(delta, spaces) * 91
    assert blocks.tolist() == [pytest.approx([1, 4 + 9]), pytest.approx([16, 25 + 36])]
    assert chance_share(2, 3, 1) == 1 / 6
    assert energy_blocks(torch.zeros(2, 3), spaces).isnan().all()


@pytest.mark.parametrize("shape", [(12, 7), (7, 12)])
def test_a_change_planted_inside_and_one_outside(shape):
    """A step along the matrix's own leading part has all its energy there; along the rest, none."""
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    spaces = principal_spaces(matrix, 3)
    inside, outside = ((u[:, at] * s[at]) @ vh[at] for at in (slice(3), slice(3, None)))
    assert energy_blocks(inside, spaces)[0, 0] == pytest.approx(1)
    assert energy_blocks(outside, spaces)[1, 1] == pytest.approx(1)
    mixed = torch.outer(u[:, 0], vh[5])
    assert energy_blocks(mixed, spaces).flatten().tolist() == pytest.approx([0, 1, 0, 0], abs=1e-12)


@pytest.mark.parametrize("rank", [1, 9])
def test_random_changes_have_the_share_of_chance(rank):
    """Whatever the change's own rank: the mean of 600 draws is k^2 / (rows cols)."""
    generator = torch.Generator().manual_seed(3)
    delta = torch.randn(15, rank, generator=generator) @ torch.randn(rank, 9, generator=generator)
    found = random_shares(delta, 3, 600, generator)
    standard_error = found.std().item() / math.sqrt(len(found))
    assert abs(found.mean().item() - chance_share(15, 9, 3)) < 4 * standard_error
    assert standard_error < 0.1 * chance_share(15, 9, 3)


def test_a_product_has_more_by_chance_than_its_size_says():
    """The change of A B by a change of B alone is within A's columns, which are all of the space.

    With A of 2 columns and k = 2 it is all inside on the left; on the right, chance is 2 of 9.
    """
    generator = torch.Generator().manual_seed(4)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    A, B = draw(15, 2), draw(2, 9)
    spaces = principal_spaces(A @ B, 2)
    found = random_factor_shares(
        Factored(A, B), Factored(A, B + 0.01 * draw(2, 9)), spaces, 600, generator
    )
    error = found.std().item() / math.sqrt(len(found))
    assert abs(found.mean().item() - 2 / 9) < 4 * error
    assert found.mean() > 5 * chance_share(15, 9, 2)


def test_the_spaces_of_a_product_are_those_of_the_matrix():
    generator = torch.Generator().manual_seed(5)
    product = Factored(
        torch.randn(9, 4, generator=generator), torch.randn(4, 7, generator=generator)
    )
    found, expected = product_spaces(product, 2), principal_spaces(product.product(), 2)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a @ a.T, b @ b.T, atol=1e-5, rtol=1e-5)


def test_heads_products_are_what_the_modules_have():
    model = load_model("reel-nano")
    products = head_products(effective_weights(model), model)
    assert len(products) == 2 * model.cfg.n_layers * model.cfg.n_heads
    attn = model.blocks[1].attn
    torch.testing.assert_close(
        products["L1H2 OV"].product().float(), attn.W_V[2] @ attn.W_O[2], atol=1e-5, rtol=1e-4
    )
    torch.testing.assert_close(
        products["L1H2 QK"].product().float(), attn.W_Q[2] @ attn.W_K[2].T, atol=1e-5, rtol=1e-4
    )
