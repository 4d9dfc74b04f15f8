"""Checks of OffPrincipal's record: singular vectors taken anew, and draws made by projectors."""

import math
import re

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.models import effective_weights
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.probes.probe import Check, Observation, Record
from rlhf_lab.training.random_streams import phase_generator
from tests.probes.audit.anew import as_float64
from tests.probes.audit.weight_delta import flattened

WORK = 4e9
"""Products that a record's decompositions may take: rows times columns times the shorter side."""
DRAWS_ANEW = 2
"""Of each kind, matrices and heads: rows whose draws are made again."""
PRODUCT = re.compile(r"L(\d+)H(\d+) (OV|QK)")
NUMBERS = ("share", "left", "right", "own", "chance", "low", "high", "times")


@torch.no_grad()
def bind_off_principal(seen: Observation, record: Record) -> list[Check]:
    """Hold stored rows to decompositions of the matrices that they name.

    1. Each matrix has one row of its size and the norm of its change, and each head two, if any.
    2. Shares are those of a full singular value decomposition, as far as that is affordable.
    3. Draws of some rows are those of projectors on the same random frames.
    """
    models = seen.ctx.reference, seen.ctx.policy.base_model
    rows, draws = record.values["rows"], as_float64(record.tensors["draws"])
    names = [row["name"] for row in rows]
    expected = _names(models[0], heads=any(map(PRODUCT.fullmatch, names)))
    if names != expected:
        return [Check.at_most("each matrix and head has one row", math.inf, 0)]
    norms, shares, chances, left_over = 0.0, 0.0, 0.0, WORK
    rng = np.random.default_rng(seen.ctx.phase)
    drawn = {True: DRAWS_ANEW, False: DRAWS_ANEW}
    again = 0.0
    for index in rng.permutation(len(rows)).tolist():
        row = rows[index]
        before, after = (matrix_named(row["name"], model) for model in models)
        delta, sizes = after - before, [row["rows"], row["cols"]]
        norm = delta.norm().item()
        norms = max(norms, abs(row["norm"] - norm) / max(norm, 1e-9) if norm else row["norm"])
        norms = max(norms, float(sizes != list(delta.shape) or row["k"] > min(sizes)))
        if not norm:
            chances = max(chances, float(any(row[x] is not None for x in NUMBERS if x != "own")))
            continue
        is_product = bool(PRODUCT.fullmatch(row["name"]))
        chances = max(chances, _chance_missed(row, draws[index], is_product))
        left_over -= delta.numel() * min(delta.shape)
        if left_over < 0:
            continue
        u, s, vh = torch.linalg.svd(before, full_matrices=False)
        P, Q = (x[:, : row["k"]] for x in (u, vh.T))
        shares = max(shares, _share_missed(row, before, delta, P, Q, s))
        if drawn[is_product]:
            drawn[is_product] -= 1
            generator = phase_generator(seen.args.seed, seen.ctx.phase, "subspaces", index)
            found = _draw(row, models, delta, P, Q, generator)
            again = max(again, abs(found - draws[index, 0].item()) / max(found, 1e-9))
    whole = _together(rows)
    off = [_apart(record.values[key], whole[key]) for key in whole]
    return [
        Check.at_most("each matrix and head has one row", 0, 0),
        Check.at_most("norms and sizes are those of the entries", norms, 1e-5),
        Check.at_most("shares are those of a singular value decomposition", shares, 1e-4),
        Check.at_most("chance and its range are those of the size and the draws", chances, 1e-6),
        Check.at_most("random changes are made again", again, 1e-4),
        Check.at_most("the whole is that of the rows", max(off), 1e-9),
    ]


def matrix_named(name: str, model: HookedModel) -> Float[Tensor, "rows cols"]:
    """The matrix that a row's name stands for, read off the modules, in float64 on the CPU."""
    found = PRODUCT.fullmatch(name)
    if found is None:
        return as_float64(flattened(name, effective_weights(model)[name]))
    first, second = _factors(name, model)
    return first @ second


def _factors(name: str, model: HookedModel) -> tuple[Tensor, Tensor]:
    """The two factors of a head's product; grouped heads read their own copy of what they share."""
    layer, head, kind = PRODUCT.fullmatch(name).groups()
    attn, head = model.blocks[int(layer)].attn, int(head)
    if kind == "OV":
        return as_float64(attn.W_V[head]), as_float64(attn.W_O[head])
    return as_float64(attn.W_Q[head]), as_float64(attn.W_K[head]).T


def _names(model: HookedModel, heads: bool) -> list[str]:
    """The rows that are to be there, in order."""
    weights = effective_weights(model)
    found = [name for name, x in weights.items() if min(flattened(name, x).shape) > 1]
    every = range(model.cfg.n_layers), range(model.cfg.n_heads)
    return found + [
        f"L{layer}H{head} {kind}"
        for layer in every[0]
        for head in every[1]
        for kind in ("OV", "QK")
        if heads
    ]


def _share_missed(
    row: dict, before: Tensor, delta: Tensor, P: Tensor, Q: Tensor, s: Tensor
) -> float:
    """By how much the shares of one row miss those of projectors."""
    k = row["k"]
    if not s[0]:
        return float(row["own"] is not None)
    if k < len(s) and s[k - 1] - s[k] < 1e-5 * s[0]:
        return 0.0  # there is no one space of the first k
    energy = delta.square().sum()
    found = {
        "share": (P @ (P.T @ delta @ Q) @ Q.T).square().sum() / energy,
        "left": 1 - (delta - P @ (P.T @ delta)).square().sum() / energy,
        "right": 1 - (delta - (delta @ Q) @ Q.T).square().sum() / energy,
        "own": s[:k].square().sum() / before.square().sum(),
    }
    return max(abs(row[key] - value.item()) for key, value in found.items())


def _chance_missed(row: dict, draws: Float[Tensor, " draws"], is_product: bool) -> float:
    """By how much chance, range and ratio of one row miss what its size and draws say."""
    chance = draws.mean().item() if is_product else row["k"] ** 2 / (row["rows"] * row["cols"])
    found = {"chance": chance, "low": draws.min().item(), "high": draws.max().item()}
    found["times"] = row["share"] / chance
    return max(_apart(row[key], value) / max(1.0, abs(value)) for key, value in found.items())


def _draw(
    row: dict,
    models: tuple[HookedModel, HookedModel],
    delta: Tensor,
    P: Tensor,
    Q: Tensor,
    generator: torch.Generator,
) -> float:
    """The first of a row's draws."""
    noise = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    if not PRODUCT.fullmatch(row["name"]):
        frames = [noise(side, row["k"]) for side in delta.shape]
        onto = [
            x @ torch.linalg.solve(x.T @ x, x.T @ y)
            for x, y in zip(frames, (delta, delta.T), strict=True)
        ]
        twice = frames[1] @ torch.linalg.solve(frames[1].T @ frames[1], frames[1].T @ onto[0].T)
        return (twice.square().sum() / delta.square().sum()).item()
    before, after = (_factors(row["name"], model) for model in models)
    moved = []
    for x, y in zip(before, after, strict=True):
        z = noise(*x.shape)
        moved.append(x + z * ((y - x).norm() / z.norm()))
    change = moved[0] @ moved[1] - before[0] @ before[1]
    return ((P.T @ change @ Q).square().sum() / change.square().sum()).item()


def _together(rows: list[dict]) -> dict[str, float | None]:
    """Means over the matrices that moved, by the energy of their changes."""
    kept = [r for r in rows if not PRODUCT.fullmatch(r["name"]) and r["share"] is not None]
    if not kept:
        return {"share": None, "chance": None}
    weight = np.square([r["norm"] for r in kept])
    return {
        key: float(np.average([r[key] for r in kept], weights=weight))
        for key in ("share", "chance")
    }


def _apart(stored: float | None, found: float | None) -> float:
    if stored is None or found is None:
        return float(stored is not found)
    return abs(stored - found)
