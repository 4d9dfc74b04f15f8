"""Shares of weight changes in their weights' leading directions, over trained seeds, by chance."""

import torch

from rlhf_lab.diffing.groups import weights_of_both
from rlhf_lab.diffing.principal import (
    chance_share,
    energy_blocks,
    head_products,
    matrices,
    principal_spaces,
    product_spaces,
    random_factor_shares,
    random_shares,
)
from rlhf_lab.models.hooked_model import HookedModel

K, DRAWS = 8, 20


def principal_shares(
    base: HookedModel, tuned: HookedModel, seed: int
) -> dict[str, dict[str, float]]:
    """Of every matrix and head's product: share, share of chance, and the most of 20 draws."""
    before, after = weights_of_both(base, tuned)
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, matrix in matrices(before).items():
        delta = matrices(after, [name])[name].double() - matrix.double()
        share = energy_blocks(delta, principal_spaces(matrix, K))[0, 0].item()
        draws = random_shares(delta, K, DRAWS, generator)
        found[name] = _row(share, chance_share(*matrix.shape, K), draws)
    products = head_products(before, base), head_products(after, base)
    for name, pair in products[0].items():
        other, spaces = products[1][name], product_spaces(pair, K)
        share = energy_blocks(other.product() - pair.product(), spaces)[0, 0].item()
        draws = random_factor_shares(pair, other, spaces, DRAWS, generator)
        found[name] = _row(share, draws.mean().item(), draws)
    return found


def principal_table(rows: list[dict[str, dict[str, float]]]) -> list[list[str]]:
    """Lines of a table: each matrix, and heads' products by layer, over the seeds.

    Args:
        rows: what `principal_shares` gave for each seed.
    """
    names = [name for name in rows[0] if " " not in name]
    groups = {name: [name] for name in names}
    for name in rows[0]:
        if name not in names:
            groups.setdefault(f"{name[:2]} heads, {name[-2:]}", []).append(name)
    lines = [["weight", "share", "by chance", "times chance", "above all draws"]]
    for label, group in groups.items():
        every = [row[name] for row in rows for name in group]
        share, chance = (torch.tensor([x[key] for x in every]) for key in ("share", "chance"))
        times = share / chance
        above = sum(x["share"] > x["high"] for x in every)
        ends = f"{share.mean():.3f} ({share.amin():.3f} to {share.amax():.3f})"
        ratio = f"{times.mean():.1f} ({times.amin():.1f} to {times.amax():.1f})"
        lines.append([label, ends, f"{chance.mean():.3f}", ratio, f"{above} of {len(every)}"])
    return lines


def _row(share: float, chance: float, draws: torch.Tensor) -> dict[str, float]:
    found = {"share": share, "chance": chance, "high": draws.max().item()}
    return {key: round(x, 5) for key, x in found.items()}
