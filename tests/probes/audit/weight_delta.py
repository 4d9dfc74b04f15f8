"""Checks of WeightDelta's record: power iteration, counted entries, and what the weights do."""

import einops
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.models import effective_weights
from rlhf_lab.models.device import exact
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.models.lora import MARK
from rlhf_lab.probes.probe import Check, Observation, Record
from tests.probes.audit.anew import as_float64, gap

MATRICES = 3
"""Matrices whose spectrum is computed anew in each record."""
OVERLAPS = 4
"""Of those that write into the residual stream, whose overlap with a direction is stored."""
STEPS, SETTLED = 200, 1e-9
DIRECTION = "unembedding"


def bind_weight_delta(
    seen: Observation, record: Record, words: tuple[int, int] | None
) -> list[Check]:
    """Hold the stored rows to the weights that they name, and the weights to what they do.

    Args:
        words: ids of the two words whose difference of unembeddings the overlaps are with.
    """
    model, reference = seen.ctx.policy.base_model, seen.ctx.reference
    before, after = effective_weights(reference), effective_weights(model)
    rows = {row["name"]: row for row in record.values["rows"]}
    misnamed = len(rows.keys() ^ before.keys()) + len(record.values["rows"]) - len(rows)
    names = list(rows.keys() & before.keys())
    norms = max(_norms(rows[name], before[name], after[name]) for name in names)
    total = sum(row["norm"] ** 2 for row in rows.values()) ** 0.5
    changed = sorted((name for name in names if rows[name]["norm"] > 0), key=list(rows).index)
    writers = [name for name in changed if f"overlap_{DIRECTION}" in rows[name]]
    drawn = np.random.default_rng(seen.ctx.phase)
    chosen = [*_draw(drawn, changed, MATRICES), *_draw(drawn, writers, OVERLAPS)]
    direction = None
    if words is not None:
        unembedding = as_float64(reference.unembed.W_U)
        direction = unembedding[:, words[0]] - unembedding[:, words[1]]
    misses = [
        _spectrum(rows[name], as_float64(after[name]) - as_float64(before[name]), name, direction)
        for name in chosen
    ]
    return [
        Check.at_most("each weight has one row", misnamed, 0),
        Check.at_most("norms and counts are those of the entries", norms, 1e-5),
        Check.at_most(
            "the total is that of the rows", abs(record.values["total_norm"] - total), 1e-6
        ),
        Check.at_most(
            "spectrum and overlap stand a power iteration", max(misses, default=0.0), 2e-3
        ),
        Check.at_most(
            "the weights compared are those that act",
            _acts(seen, model, after),
            seen.allowed(1e-3, half=0.5),
        ),
    ]


def _draw(generator: np.random.Generator, names: list[str], n: int) -> list[str]:
    return [names[i] for i in generator.permutation(len(names))[:n]]


def _norms(row: dict, before: Tensor, after: Tensor) -> float:
    """By how much norms and counts of a row miss, entry by entry."""
    before, after = before.detach(), after.detach()
    # rows are summed up by themselves, since float32 loses digits over millions of entries
    length = lambda x: exact(x.float().square().sum(-1)).sum().sqrt().item()
    unchanged = lambda x, y: 1 - torch.count_nonzero(x != y).item() / x.numel()
    moved, size = length(after.float() - before.float()), length(before)
    same, same_bf16 = unchanged(before, after), unchanged(before.bfloat16(), after.bfloat16())
    misses = [
        abs(row["norm"] - moved) / max(1.0, moved),
        abs(row["relative"] * max(size, 1e-12) - moved) / max(1.0, moved),
        abs(row["unchanged"] - same),
        abs(row["unchanged_bf16"] - same_bf16),
    ]
    return max(misses)


def flattened(name: str, delta: Tensor) -> Float[Tensor, "rows cols"]:
    """A weight as the map that it is: heads side by side; a bias as one row."""
    if delta.ndim == 3 and name.endswith("W_O"):
        return delta.flatten(0, 1)
    if delta.ndim == 3:
        return einops.rearrange(delta, "head d_model d_head -> d_model (head d_head)")
    if delta.ndim == 2 and name.split(".")[-1].lstrip("_").startswith("b_"):
        return delta.reshape(1, -1)
    return delta.reshape(-1, delta.shape[-1])


def _spectrum(
    row: dict, delta: Tensor, name: str, direction: Float[Tensor, " d_model"] | None
) -> float:
    """By how much spectrum, ranks and overlap of one row miss, as shares."""
    matrix = flattened(name, delta)
    top, right = power_iteration(matrix)
    stored, energy = row["s"], matrix.square().sum().item()
    misses = [abs(stored[0] - top) / max(top, 1e-12)]
    misses += [
        max(0.0, later - earlier) for earlier, later in zip(stored, stored[1:], strict=False)
    ]
    misses.append(abs(row["stable_rank"] - energy / top**2) / (energy / top**2))
    squares = np.cumsum(np.square(stored)) / energy
    whole = len(stored) == min(matrix.shape)
    if row["k90"] <= len(stored):  # later ones are not stored
        enough = squares[row["k90"] - 1] >= 0.9 - 1e-6
        fewer = row["k90"] == 1 or squares[row["k90"] - 2] < 0.9 + 1e-6
        misses.append(0.0 if enough and fewer else 1.0)
    elif whole or squares[-1] >= 0.9 + 1e-6:
        misses.append(1.0)
    if direction is not None and f"overlap_{DIRECTION}" in row:
        unit = direction / direction.norm()
        misses.append(gap(row[f"energy_{DIRECTION}"], (matrix @ unit).square().sum() / energy))
        if len(stored) < 2 or stored[1] < 0.97 * stored[0]:  # else there is no one first vector
            misses.append(gap(row[f"overlap_{DIRECTION}"], (right @ unit).abs()) / 5)
    return max(misses)


def power_iteration(matrix: Float[Tensor, "rows cols"]) -> tuple[float, Float[Tensor, " cols"]]:
    """The largest singular value, and its right singular vector, on the side of the columns.

    It ends where the vector stays as it is.
    """
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(matrix.shape[1], generator=generator, dtype=matrix.dtype)
    for _ in range(STEPS):
        before, vector = vector, matrix.T @ (matrix @ vector)
        vector = vector / vector.norm().clamp(min=1e-300)
        if (vector - before).norm() < SETTLED:
            break
    return (matrix @ vector).norm().item(), vector


def _acts(seen: Observation, model: HookedModel, after: dict[str, Tensor]) -> float:
    """By how much the reference with these weights misses the policy's own logits."""
    if seen.text is None or any(point.fwd_hooks for point in model.hook_dict.values()):
        return 0.0
    tokens = seen.text.tokens[0][seen.text.attention_mask[0]][None]
    mask = torch.ones_like(tokens)
    reference = seen.ctx.reference
    weights = _with_adapters_off(reference, after)
    swapped = torch.func.functional_call(reference, weights, (tokens,), {"attention_mask": mask})
    return gap(swapped, model(tokens, attention_mask=mask))


def _with_adapters_off(reference: HookedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Effective weights by the names that the reference has for them, its own adapters zero.

    It has adapters where it was reset to a policy that has.
    """
    found = {}
    for name, weight in reference.named_parameters():
        if MARK not in name:
            found[name] = weights[name]
        elif name.endswith(".original"):
            found[name] = weights[name.replace(MARK, ".").removesuffix(".original")]
        else:
            found[name] = torch.zeros_like(weight)
    return found
