"""OffPrincipal: the fraction of each weight's change in that weight's own leading directions."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.diffing.groups import weights_of_both
from rlhf_lab.diffing.weights import Weights, as_matrix, spectrum
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.device import exact
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.probes.probe import Check, Observation, Probe, Record
from rlhf_lab.training.random_streams import phase_generator

Spaces = tuple[Float[Tensor, "rows k"], Float[Tensor, "cols k"]]  # orthonormal bases


class Factored(NamedTuple):
    """A matrix as a product, such as a head's W_V W_O, or W_Q W_K'."""

    first: Float[Tensor, "rows inner"]
    second: Float[Tensor, "inner cols"]

    def product(self) -> Float[Tensor, "rows cols"]:
        """Return the matrix."""
        return self.first @ self.second


class _Change(NamedTuple):
    name: str
    base: Float[Tensor, "rows cols"]
    delta: Float[Tensor, "rows cols"]
    spaces: Spaces
    factors: tuple[Factored, Factored] | None = None


class OffPrincipal(Probe):
    """The fraction of each weight's change in the first k singular vectors of the weight.

    Changes since the reference of every matrix, heads side by side, and of each head's W_V W_O (OV)
    and W_Q W_K' (QK). The fraction of a random change is k^2 / (rows cols); for a head's product,
    the mean of draws that change both factors at random by as much as they did change. A change
    above the range of the draws is on-principal, one below it off-principal, as Zhu et al. 2025
    (arXiv 2511.08567) report of RLVR. The probe reads weights only, without a forward pass.

    Checks: the four parts of each change's energy sum to 1; no energy before learning.

    Args:
        k: singular vectors on each side, at most the shorter side of a matrix.
        draws: random changes of each matrix.
        heads: True to include the heads' products, each a matrix of d_model squared.

    Raises:
        ConfigError: If k or draws is below 1.
    """

    name = "off_principal"
    question = "Is the change of a weight within the leading directions of that weight?"
    caveat = "Compare each fraction with the range of random changes, not with 0."
    every = 20

    def __init__(
        self,
        k: int = 8,
        draws: int = 20,
        heads: bool = True,
        every: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(every, name)
        for field, value in (("k", k), ("draws", draws)):
            if value < 1:
                raise ConfigError(f"{field}={value} of {self.name} must be at least 1.")
        self.k, self.draws, self.heads = k, draws, heads

    @torch.no_grad()
    def observe(self, seen: Observation) -> Record:
        rows, drawn, misses = [], [], [0.0]
        for index, (name, base, delta, spaces, factors) in enumerate(self._changes(seen)):
            n_rows, n_cols = delta.shape
            k, norm = spaces[0].shape[1], delta.norm().item()
            row = {"name": name, "rows": n_rows, "cols": n_cols, "k": k, "norm": norm}
            row["own"] = energy_blocks(base, spaces)[0, 0].item() if base.any() else None
            row |= dict.fromkeys(("share", "left", "right", "chance", "low", "high", "times"))
            fractions = torch.full((self.draws,), torch.nan, dtype=torch.float64)
            if norm > 0:
                blocks = energy_blocks(delta, spaces)
                misses.append(abs(blocks.sum().item() - 1))
                generator = phase_generator(seen.args.seed, seen.ctx.phase, "subspaces", index)
                if factors is None:
                    fractions = random_shares(delta, self.k, self.draws, generator)
                    chance = chance_share(n_rows, n_cols, k)
                else:
                    fractions = random_factor_shares(*factors, spaces, self.draws, generator)
                    chance = fractions.mean().item()
                row |= {
                    "share": blocks[0, 0].item(),
                    "left": blocks[0].sum().item(),
                    "right": blocks[:, 0].sum().item(),
                    "chance": chance,
                    "low": fractions.min().item(),
                    "high": fractions.max().item(),
                    "times": blocks[0, 0].item() / chance,
                }
            rows.append(row)
            drawn.append(fractions)
        checks = [Check.at_most("the parts of a change's energy sum to 1", max(misses), 1e-9)]
        whole = rows_together([row for row in rows if not row["name"].endswith((" OV", " QK"))])
        if seen.ctx.phase == 0 and "reference" not in seen.custom_components:
            total = sum(row["norm"] for row in rows)
            checks.append(Check.at_most("no weight has changed before learning", total, 0.0))
        return Record({**whole, "rows": rows}, {"draws": torch.stack(drawn)}, checks)

    def _changes(self, seen: Observation) -> Iterator[_Change]:
        reference = seen.ctx.reference
        before, after = weights_of_both(reference, seen.ctx.policy.base_model)
        others = matrices(after)
        for name, matrix in matrices(before).items():
            base = exact(matrix)
            delta = exact(others[name]) - base
            yield _Change(name, base, delta, principal_spaces(base, self.k))
        if not self.heads:
            return
        products = head_products(after, reference)
        for name, factored in head_products(before, reference).items():
            base, pair = factored.product(), (factored, products[name])
            spaces = product_spaces(factored, self.k)
            yield _Change(name, base, products[name].product() - base, spaces, pair)


def rows_together(rows: list[dict]) -> dict[str, float | None]:
    """Return the fraction of all matrices together, and of random changes; None if none changed."""
    changed = [row for row in rows if row["share"] is not None]
    energy = sum(row["norm"] ** 2 for row in changed)
    if not energy:
        return {"share": None, "chance": None}
    return {
        key: sum(row["norm"] ** 2 * row[key] for row in changed) / energy
        for key in ("share", "chance")
    }


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
