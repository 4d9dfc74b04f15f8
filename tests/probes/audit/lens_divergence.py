"""Checks of LensDivergence's record: texts run alone to a layer, and a translator solved again."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlhf_lab.models.hooked_model import HookedModel, without_hooks
from rlhf_lab.probes.probe import Check, Observation, Record
from rlhf_lab.probes.text_rows import TextRows
from tests.probes.audit.anew import as_float64, gap, log_probs_by_hand, relative_gap, unpadded_row
from tests.probes.audit.intervals import check_widths
from tests.probes.audit.labels import check_slots
from tests.probes.audit.tuned_lens import solved_translator

TEXTS_STOPPED, LAYERS_STOPPED = 2, 4
LEAST = 0.01
"""Nats per token, of which misses are shares where the KL is less."""


@torch.no_grad()
def bind_lens_divergence(seen: Observation, record: Record, rows: TextRows) -> list[Check]:
    """Hold stored cells to forwards of single texts without padding, stopped at a layer.

    1. Names, means and intervals are those of the stored rows.
    2. Random texts are run up to random layers, and read by a norm and an unembedding written out.
    3. One layer's translator is solved again from forwards of its own, and read likewise.

    Args:
        rows: the sequences that were looked at.
    """
    values, stored = record.values, record.tensors
    models = seen.ctx.policy.base_model, seen.ctx.reference
    n_layers = models[0].cfg.n_layers
    names = ["embed"] + [f"L{layer}" for layer in range(n_layers)]
    misnamed = values["layers"] != names or values["n"] != stored["raw"].shape[1]
    rng = np.random.default_rng(seen.ctx.phase)
    texts = rng.permutation(len(rows.tokens))[:TEXTS_STOPPED].tolist()
    layers = rng.permutation(n_layers + 1)[:LAYERS_STOPPED].tolist()
    allowed = seen.allowed(1e-4, half=0.3)
    with without_hooks(*models):
        missed = max(
            _cell_gap(stored["raw"][layer], stored["states"], text, models, layer, rows)
            for text in texts
            for layer in layers
        )
        tuned = _tuned(seen, record, rows, rng) if "tuned" in stored else []
    states = torch.stack([_placed(rows, row) for row in range(len(rows.tokens))])
    checks = [
        Check.at_most("layers are named, and texts counted", float(misnamed), 0),
        Check.at_most("states are those of the texts", gap(stored["states"], states), 0),
        Check.at_most("a layer is read as in a forward that stops there", missed, allowed),
        *tuned,
    ]
    for name in [name for name in ("raw", "tuned") if name in stored]:
        checks += _means(name, record)
    if "slots" in values:
        checks.append(check_slots(seen, record, first=1))
    return checks


def _placed(rows: TextRows, row: int) -> Tensor:
    """Which of a row's own tokens are states that count, without its left padding."""
    real = rows.attention_mask[row].nonzero()[0, 0]
    return rows.states[row].roll(-int(real)).cpu()


def _stopped(
    model: HookedModel, text: Int[Tensor, " seq"], layer: int
) -> Float[Tensor, "seq d_model"]:
    """The residual in front of a block, or behind the last one, of one text."""
    tokens = text[None].to(next(model.parameters()).device)
    mask = torch.ones_like(tokens)
    return as_float64(model(tokens, attention_mask=mask, stop_at_layer=layer))[0]


def _cell_gap(
    stored: Float[Tensor, "batch seq"],
    states: Tensor,
    row: int,
    models: tuple[HookedModel, HookedModel],
    layer: int,
    rows: TextRows,
    maps: tuple = (),
    first: int = 0,
) -> float:
    """By how much one row of a layer misses what its text alone gives, as a share."""
    text = unpadded_row(rows, row)
    logs = []
    for model in models:
        h = _stopped(model, text, layer)
        for function in maps:
            h = function(h)
        logs.append(log_probs_by_hand(model, h))
    kl = (logs[0].exp() * (logs[0] - logs[1])).sum(-1)
    found = torch.zeros(stored.shape[1], dtype=torch.float64)
    found[: len(kl)] = kl
    found[~states[row].bool()] = 0.0
    return relative_gap(stored[row - first], found, least=LEAST)


def _tuned(
    seen: Observation, record: Record, rows: TextRows, rng: np.random.Generator
) -> list[Check]:
    """One layer's translator, from the reference's forwards of single texts, and one row of it."""
    values, stored = record.values, record.tensors
    models = seen.ctx.policy.base_model, seen.ctx.reference
    n, n_layers = len(rows.tokens), models[0].cfg.n_layers
    cut = 2 * n // 3
    layer = int(rng.integers(n_layers))
    text = cut + int(rng.integers(n - cut))
    fit = [
        torch.cat([_stopped(models[1], unpadded_row(rows, row), at) for row in range(cut)])
        for at in (layer, n_layers)
    ]
    translator = solved_translator(*fit, values["tuned_ridge"])
    missed = _cell_gap(
        stored["tuned"][layer], stored["states"], text, models, layer, rows, (translator,), cut
    )
    last = gap(stored["tuned"][-1], stored["raw"][-1][cut:])
    kept = float(values["held_out"] != n - cut or stored["tuned"].shape[1] != n - cut)
    left = _left(values, models[1], rows, cut, rng)
    return [
        Check.at_most("held-out texts are counted", kept, 0),
        Check.at_most("a translator solved again reads the same", missed, seen.allowed(1e-3, 0.3)),
        Check.at_most("the tuned lens of the last layer is the raw one", last, 1e-6),
        Check.at_most("what a translator leaves is found again", left, seen.allowed(0.01, 0.1)),
    ]


def _left(
    values: dict,
    reference: HookedModel,
    rows: TextRows,
    cut: int,
    rng: np.random.Generator,
) -> float:
    """By how much the stored variance that a translator leaves misses, on texts held out of it."""
    inner, last = cut * 3 // 4, reference.cfg.n_layers
    at = int(rng.integers(len(values["tuned_layers"])))
    x, y = (
        [_stopped(reference, unpadded_row(rows, row), layer) for row in range(cut)]
        for layer in (values["tuned_layers"][at], last)
    )
    made = solved_translator(torch.cat(x[:inner]), torch.cat(y[:inner]), values["tuned_ridge"])
    held, found = torch.cat(y[inner:]), made(torch.cat(x[inner:]))
    left = (held - found).square().sum() / (held - held.mean(0)).square().sum()
    return abs(values["tuned_left"][at] - left.item()) / max(1.0, left.item())


def _means(name: str, record: Record) -> list[Check]:
    """Stored means and intervals of one lens are those of its stored rows."""
    x = as_float64(record.tensors[name])
    counts = as_float64(record.tensors["states"])[-x.shape[1] :].sum(1)
    sums = x.sum(2)
    means = sums.sum(1) / counts.sum()
    missed = relative_gap(record.values[name], means, least=LEAST)
    checks = [Check.at_most(f"means of {name} are those of its rows", missed, 1e-4)]
    if f"{name}_low" in record.values:
        ends = record.values[f"{name}_low"], record.values[f"{name}_high"]
        # each row's share in the error of a ratio
        rows = means[:, None] + (sums - means[:, None] * counts) / counts.mean()
        mask = np.ones(rows.T.shape, dtype=bool)
        checks.append(check_widths(f"{name} by layer", ends, rows.T.numpy(), mask))
    return checks
