"""Checks of Fisher's record: second differences of the KL of models with one block moved."""

import copy

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab.models import effective_weights, merged_copy
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.models.reference import model_where_exact
from rlhf_lab.probes.fisher import short_share
from rlhf_lab.probes.probe import Check, Observation, Record
from rlhf_lab.probes.text_rows import TextRows
from tests.probes.audit.anew import as_float64, relative_gap
from tests.probes.audit.kl_attribution import kl_at_states, share_of_group

ROWS_MOVED = 4


@torch.no_grad()
def bind_fisher(seen: Observation, record: Record, rows: TextRows) -> list[Check]:
    """Hold stored blocks, shares and means to the KL of copies that are moved by a block's name.

    Args:
        rows: the sequences that were looked at.
    """
    stored, values = record.tensors, record.values
    means = max(relative_gap(values[x], as_float64(stored[x]).mean(1)) for x in ("quad", "kl"))
    whole, at = as_float64(stored["quad_whole"]), as_float64(stored["kl_at"]).sum(1)
    ratios = [
        abs(ratio - at[i].item() / (a**2 * whole.sum().item()))
        for i, (a, ratio) in enumerate(zip(values["a"], values["ratio"], strict=True))
        if ratio is not None
    ]
    models = [model_where_exact(m) for m in (seen.ctx.reference, seen.ctx.policy.base_model)]
    base = merged_copy(models[0]).to(torch.float64, print_details=False)
    before, after = ({k: w.double() for k, w in effective_weights(m).items()} for m in models)
    some = range(min(ROWS_MOVED, len(rows.tokens)))
    rng = np.random.default_rng(seen.ctx.phase)
    share = float(values["a"][int(rng.integers(len(values["a"])))])
    end = values["a"].index(share)
    kl_miss = quad_miss = 0.0
    size = max(as_float64(stored["kl"]).max().item(), 1e-9)
    every: dict[str, Tensor] = {key: after[key] - before[key] for key in before}
    for index, name in enumerate(values["groups"]):
        change = {k: share_of_group(name, k, x, models[0], fine=False) for k, x in every.items()}
        put_in = _kl(base, before, change, 1.0, rows, some)
        kl_miss = max(kl_miss, _gap(stored["kl"][index, : len(some)], put_in, size))
    index = int(rng.integers(len(values["groups"])))
    change = {
        k: share_of_group(values["groups"][index], k, x, models[0], fine=False)
        for k, x in every.items()
    }
    for row, moved in ((stored["quad"][index], change), (whole, every)):
        found = as_float64(row)[: len(some)]
        step = short_share(found.mean().item())
        ends = [_kl(base, before, moved, sign * step, rows, some) for sign in (1, -1)]
        second = (ends[0] + ends[1]) / (2 * step**2)
        quad_miss = max(quad_miss, _gap(found, second, max(second.max().item(), 1e-9)))
    kl_whole = _kl(base, before, every, share, rows, some)
    miss = _gap(stored["kl_at"][end, : len(some)], kl_whole, max(kl_whole.max().item(), 1e-9))
    return [
        Check.at_most("stored means are those of the stored rows", means, 1e-4),
        Check.at_most("ratios are those of the stored rows", max(ratios, default=0.0), 1e-3),
        Check.at_most("blocks' KLs are those of copies moved by name", kl_miss, 1e-3),
        Check.at_most("quadratic forms are second differences of the KL", quad_miss, 0.02),
        Check.at_most("the KL at a share is that of a moved copy", miss, 1e-3),
    ]


def _gap(stored: Tensor, found: Tensor, size: float) -> float:
    return (as_float64(stored) - found).abs().max().item() / size


def _kl(
    base: HookedModel,
    before: dict[str, Tensor],
    change: dict[str, Tensor],
    share: float,
    rows: TextRows,
    some: range,
) -> Float[Tensor, " row"]:
    """The KL of some sequences, of a copy whose weights are moved, from the base."""
    moved = copy.deepcopy(base)
    for key, parameter in moved.named_parameters():
        parameter.copy_(before[key] + share * change[key])
    return kl_at_states(moved, base, rows, list(some)).sum(1)
