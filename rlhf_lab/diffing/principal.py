"""Principal subspaces: the part of a weight's change in its own leading singular vectors."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.diffing.weights import as_matrix, spectrum
from rlhf_lab.models.device import exact
from rlhf_lab.models.hooked_model import HookedModel


class Spaces(NamedTuple):
    """Orthonormal bases of a space of rows and of one of columns."""

    left: Float[Tensor, "rows k"]
    right: Float[Tensor, "cols k"]


class Factored(NamedTuple):
    """A matrix as a product, such as a head's W_V W_O, or W_Q W_K'."""

    first: Float[Tensor, "rows inner"]
    second: Float[Tensor, "inner cols"]

    def product(self) -> Float[Tensor, "rows cols"]:
        """Return the matrix."""
        return self.first @ self.second


def principal_spaces(matrix: Float[Tensor, "rows cols"], k: int) -> Spaces:
    """Return the first k singular vectors of a matrix on both sides, in float64."""
    matrix = exact(matrix)
    short = spectrum(matrix)[1][:, :k]
    if matrix.shape[0] <= matrix.shape[1]:
        return Spaces(short, torch.linalg.qr(matrix.T @ short)[0])
    return Spaces(torch.linalg.qr(matrix @ short)[0], short)


def product_spaces(product: Factored, k: int) -> Spaces:
    """Return `principal_spaces` of a product, at the cost of its inner side."""
    (q_left, r_left), (q_right, r_right) = (
        torch.linalg.qr(exact(x)) for x in (product.first, product.second.T)
    )
    u, _, vh = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)
    return Spaces(q_left @ u[:, :k], q_right @ vh[:k].T)


def energy_blocks(delta: Float[Tensor, "rows cols"], spaces: Spaces) -> Float[Tensor, "2 2"]:
    """Return the fractions of a change's energy inside and outside the two spaces.

    Row 0 is inside the left space, column 0 inside the right one, so [0, 0] is the energy in both.
    The four sum to 1; all are nan for a change of 0.

    fraction = ||U_k' D V_k||^2 / ||D||^2
    """
    delta, left, right = exact(delta), exact(spaces.left), exact(spaces.right)
    within = left.T @ delta
    outside = delta - left @ within
    parts = []
    for rows in (within, outside):
        along = rows @ right
        parts += [along.square().sum(), (rows - along @ right.T).square().sum()]
    return torch.stack(parts).reshape(2, 2) / delta.square().sum()


def chance_share(rows: int, cols: int, k: int) -> float:
    """Return the mean fraction of energy in random k-dimensional spaces: k^2 / (rows cols)."""
    return min(k, rows, cols) ** 2 / (rows * cols)


def random_shares(
    delta: Float[Tensor, "rows cols"], k: int, draws: int, generator: torch.Generator
) -> Float[Tensor, " draws"]:
    """Return fractions of changes with these singular values and random singular vectors.

    The mean over many draws is `chance_share`.
    """
    delta = exact(delta)
    found = []
    for _ in range(draws):
        frames = (_frame(side, min(k, *delta.shape), generator) for side in delta.shape)
        left, right = (frame.to(delta) for frame in frames)
        found.append((left.T @ delta @ right).square().sum())
    return torch.stack(found).cpu() / delta.square().sum().cpu()


def random_factor_shares(
    before: Factored, after: Factored, spaces: Spaces, draws: int, generator: torch.Generator
) -> Float[Tensor, " draws"]:
    """Return fractions of a product's change for Gaussian changes of both factors, of equal norm.

    Such a change is not a random matrix: A dB is within the columns of A, so its fraction in the
    leading space is far above k^2 / (rows cols).
    """
    before, after = (Factored(exact(m.first), exact(m.second)) for m in (before, after))
    left, right = exact(spaces.left), exact(spaces.right)
    found = []
    for _ in range(draws):
        first, second = (
            _of_norm(torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x), y - x)
            for x, y in zip(before, after, strict=True)
        )
        # A1 B1 - A0 B0 = dA B1 + A0 dB, without a difference of near numbers
        tall = torch.cat([first, before.first], 1)
        wide = torch.cat([before.second + second, second])
        inside = (left.T @ tall) @ (wide @ right)
        found.append(inside.square().sum() / ((tall.T @ tall) * (wide @ wide.T)).sum())
    return torch.stack(found).cpu()


def head_products(
    weights: Mapping[str, Float[Tensor, "..."]], model: HookedModel
) -> dict[str, Factored]:
    """Return W_V W_O and W_Q W_K' of each head by name, "L0H1 OV" and "L0H1 QK", in float64."""
    found = {}
    for layer in range(model.cfg.n_layers):
        W = {name: _of_layer(weights, layer, name) for name in ("W_Q", "W_K", "W_V", "W_O")}
        for head in range(len(W["W_Q"])):
            shared = head * len(W["W_K"]) // len(W["W_Q"])
            found[f"L{layer}H{head} OV"] = Factored(W["W_V"][shared], W["W_O"][head])
            found[f"L{layer}H{head} QK"] = Factored(W["W_Q"][head], W["W_K"][shared].T)
    return found


def matrices(
    weights: Mapping[str, Float[Tensor, "..."]], names: Sequence[str] | None = None
) -> dict[str, Float[Tensor, "rows cols"]]:
    """Return the weights that are matrices, heads side by side; no biases and gains."""
    laid_out = {name: as_matrix(name, weights[name]) for name in names or weights}
    return {name: matrix for name, matrix in laid_out.items() if min(matrix.shape) > 1}


def _of_layer(
    weights: Mapping[str, Float[Tensor, "..."]], layer: int, name: str
) -> Float[Tensor, "head rows cols"]:
    own = f"blocks.{layer}.attn.{name}"
    return exact(weights[own] if own in weights else weights[f"blocks.{layer}.attn._{name}"])


def _frame(side: int, k: int, generator: torch.Generator) -> Float[Tensor, "side k"]:
    noise = torch.randn(side, k, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(noise)[0]


def _of_norm(
    x: Float[Tensor, "rows cols"], like: Float[Tensor, "rows cols"]
) -> Float[Tensor, "rows cols"]:
    return x * (like.norm() / x.norm())
