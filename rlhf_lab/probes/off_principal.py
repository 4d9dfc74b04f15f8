"""Fractions of a weight's change in the weight's own leading directions, and random changes."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.diffing.weights import Weights, as_matrix, spectrum
from rlhf_lab.models.device import exact
from rlhf_lab.models.hooked_model import HookedModel

Spaces = tuple[Float[Tensor, "rows k"], Float[Tensor, "cols k"]]  # orthonormal bases


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
        return short, torch.linalg.qr(matrix.T @ short)[0]
    return torch.linalg.qr(matrix @ short)[0], short


def product_spaces(product: Factored, k: int) -> Spaces:
    """Return `principal_spaces` of a product, at the cost of its inner side."""
    (q_left, r_left), (q_right, r_right) = (
        torch.linalg.qr(exact(x)) for x in (product.first, product.second.T)
    )
    u, _, vh = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)
    return q_left @ u[:, :k], q_right @ vh[:k].T


def energy_blocks(delta: Float[Tensor, "rows cols"], spaces: Spaces) -> Float[Tensor, "2 2"]:
    """Return the fractions of a change's energy inside and outside the two spaces.

    Row 0 is inside the left space, column 0 inside the right one, so [0, 0] is the energy in both.
    The four sum to 1; all are nan for a change of 0.

    fraction = ||U_k' D V_k||^2 / ||D||^2
    """
    delta, left, right = map(exact, (delta, *spaces))
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
    fractions = []
    for _ in range(draws):
        frames = (_frame(side, min(k, *delta.shape), generator) for side in delta.shape)
        left, right = (frame.to(delta) for frame in frames)
        fractions.append((left.T @ delta @ right).square().sum())
    return torch.stack(fractions).cpu() / delta.square().sum().cpu()


def random_factor_shares(
    before: Factored, after: Factored, spaces: Spaces, draws: int, generator: torch.Generator
) -> Float[Tensor, " draws"]:
    """Return fractions of a product's change for Gaussian changes of both factors, of equal norm.

    Such a change is not a random matrix: A dB is within the columns of A, so its fraction in the
    leading space is far above k^2 / (rows cols).
    """
    before, after = (Factored(exact(m.first), exact(m.second)) for m in (before, after))
    left, right = map(exact, spaces)
    fractions = []
    for _ in range(draws):
        noise = [
            torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in before
        ]
        first, second = (
            x * ((new - old).norm() / x.norm())
            for x, old, new in zip(noise, before, after, strict=True)
        )
        # A1 B1 - A0 B0 = dA B1 + A0 dB, without a difference of near numbers
        tall = torch.cat([first, before.first], 1)
        wide = torch.cat([before.second + second, second])
        inside = (left.T @ tall) @ (wide @ right)
        fractions.append(inside.square().sum() / ((tall.T @ tall) * (wide @ wide.T)).sum())
    return torch.stack(fractions).cpu()


def head_products(weights: Weights, model: HookedModel) -> dict[str, Factored]:
    """Return W_V W_O and W_Q W_K' of each head by name, "L0H1 OV" and "L0H1 QK", in float64."""
    found = {}
    for layer in range(model.cfg.n_layers):
        W = {}
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            key = f"blocks.{layer}.attn.{name}"
            W[name] = exact(weights[key if key in weights else f"blocks.{layer}.attn._{name}"])
        for head in range(len(W["W_Q"])):
            shared = head * len(W["W_K"]) // len(W["W_Q"])
            found[f"L{layer}H{head} OV"] = Factored(W["W_V"][shared], W["W_O"][head])
            found[f"L{layer}H{head} QK"] = Factored(W["W_Q"][head], W["W_K"][shared].T)
    return found


def matrices(weights: Weights) -> dict[str, Float[Tensor, "rows cols"]]:
    """Return the weights that are matrices, heads side by side; no biases and gains."""
    laid_out = {name: as_matrix(name, weight) for name, weight in weights.items()}
    return {name: matrix for name, matrix in laid_out.items() if min(matrix.shape) > 1}


def _frame(side: int, k: int, generator: torch.Generator) -> Float[Tensor, "side k"]:
    noise = torch.randn(side, k, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(noise)[0]
