"""OffPrincipal: whether the change of each weight lies in that weight's own leading directions."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.diffing.groups import weights_of_both
from rlhf_lab.diffing.principal import (
    Spaces,
    chance_share,
    energy_blocks,
    head_products,
    matrices,
    principal_spaces,
    product_spaces,
    random_factor_shares,
    random_shares,
)
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.device import exact
from rlhf_lab.probes.probe import Check, Observation, Probe, Record
from rlhf_lab.training.random_streams import phase_generator


class OffPrincipal(Probe):
    """The share of each weight's change that lies in the first k singular vectors of the weight.

    Taken against the reference, of every matrix with its heads side by side, and of what each head
    does: W_V W_O (OV) and W_Q W_K' (QK). The share of a change in random directions is
    k^2 / (rows cols); of a head's product it is drawn, with both factors changed at random by as
    much as they did change. Beside each stands the range of 20 such draws. Above it the change is
    on-principal, below it off-principal, as Zhu et al. 2025 (arXiv 2511.08567) report of RLVR.

    It reads weights alone, so that it costs no forward pass.

    Checks: the four parts of each change's energy sum to 1; no energy before learning.

    Args:
        k: singular vectors on each side; a matrix with a shorter side has as many as that.
        draws: random changes of each.
        heads: whether to take heads' products too, for which each is a matrix of d_model squared.

    Raises:
        ConfigError: k or draws below 1.
    """

    name = "off_principal"
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
        """Measure every matrix, and every head's products."""
        rows, drawn, misses = [], [], [0.0]
        for index, change in enumerate(self._changes(seen)):
            row = {"name": change.name, "rows": len(change.delta), "cols": change.delta.shape[1]}
            row |= {"k": change.spaces.left.shape[1], "norm": change.delta.norm().item()}
            row |= {"own": change.own, "share": None, "left": None, "right": None}
            shares = torch.full((self.draws,), math.nan, dtype=torch.float64)
            if row["norm"] > 0:
                blocks = energy_blocks(change.delta, change.spaces)
                misses.append(abs(blocks.sum().item() - 1))
                row |= {
                    "share": blocks[0, 0].item(),
                    "left": blocks[0].sum().item(),
                    "right": blocks[:, 0].sum().item(),
                }
                shares = self._at_random(seen, index, change)
            rows.append(row | _chance(row, shares, change.factors is not None))
            drawn.append(shares)
        checks = [Check.at_most("the parts of a change's energy sum to 1", max(misses), 1e-9)]
        whole = rows_together([row for row in rows if not row["name"].endswith((" OV", " QK"))])
        if seen.ctx.phase == 0 and "reference" not in seen.custom_components:
            total = sum(row["norm"] for row in rows)
            checks.append(Check.at_most("no weight has changed before learning", total, 0.0))
        return Record({**whole, "rows": rows}, {"draws": torch.stack(drawn)}, checks)

    def _changes(self, seen: Observation) -> Iterator["_Change"]:
        """Every matrix of the model, then every product of a head's."""
        reference = seen.ctx.reference
        before, after = weights_of_both(reference, seen.ctx.policy.base_model)
        others = matrices(after)
        for name, matrix in matrices(before).items():
            base = exact(matrix)
            delta = exact(others[name]) - base
            yield _change(name, base, delta, principal_spaces(base, self.k))
        if not self.heads:
            return
        products = head_products(after, reference)
        for name, base in head_products(before, reference).items():
            pair = base, products[name]
            delta = pair[1].product() - pair[0].product()
            change = _change(name, base.product(), delta, product_spaces(base, self.k))
            yield change._replace(factors=pair)

    def _at_random(
        self, seen: Observation, index: int, change: "_Change"
    ) -> Float[Tensor, " draws"]:
        generator = phase_generator(seen.args.seed, seen.ctx.phase, "subspaces", index)
        if change.factors is None:
            return random_shares(change.delta, self.k, self.draws, generator)
        return random_factor_shares(*change.factors, change.spaces, self.draws, generator)


class _Change(NamedTuple):
    """A matrix's change, the matrix's leading spaces, and how much of the matrix lies in them."""

    name: str
    delta: Float[Tensor, "rows cols"]
    spaces: Spaces
    own: float | None
    factors: tuple | None = None


def _change(
    name: str,
    base: Float[Tensor, "rows cols"],
    delta: Float[Tensor, "rows cols"],
    spaces: Spaces,
) -> _Change:
    own = energy_blocks(base, spaces)[0, 0].item() if base.any() else None
    return _Change(name, delta, spaces, own)


def _chance(
    row: dict[str, Any], shares: Float[Tensor, " draws"], is_product: bool
) -> dict[str, float | None]:
    """What a random change has, its range over draws, and how many times that the share is."""
    if row["share"] is None:
        return {"chance": None, "low": None, "high": None, "times": None}
    chance = chance_share(row["rows"], row["cols"], row["k"])
    chance = shares.mean().item() if is_product else chance
    ends = {"low": shares.min().item(), "high": shares.max().item()}
    return {"chance": chance, **ends, "times": row["share"] / chance}


def rows_together(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """The share of all matrices' energy together, and the share of chance; None if none moved."""
    moved = [row for row in rows if row["share"] is not None]
    energy = sum(row["norm"] ** 2 for row in moved)
    if not energy:
        return {"share": None, "chance": None}
    return {
        key: sum(row["norm"] ** 2 * row[key] for row in moved) / energy
        for key in ("share", "chance")
    }
