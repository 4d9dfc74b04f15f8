"""Checks of Direction's record: some of its cells fitted and counted again, and the control."""

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.probes.bindings.anew import as_float64, gap
from rlhf_lab.probes.probe import Check, Observation, Record

CONTROL_ERRORS = 4.5
"""Standard errors by which the best of all cells may read labels that were shuffled."""
RIDGE = 1e-4


class Reader(NamedTuple):
    """A direction of length 1, and the projection above which the label is True."""

    direction: Float[np.ndarray, " d_model"]
    threshold: float


def bind_direction(seen: Observation, record: Record, method: str) -> list[Check]:
    """Hold some cells to a fit of their own, and shuffled labels to chance.

    1. Of the first, the last and a random site, at a random position each, take the activations by
       the site's stored name.
    2. Fit on the first two thirds, by the normal equations; count on the last third.
    """
    labels = seen.text.labels.cpu().numpy()
    cut, sites = 2 * len(labels) // 3, record.values["sites"]
    chosen = np.random.default_rng(seen.ctx.phase)
    seq = seen.text.tokens.shape[1]
    cells = {(0, int(chosen.integers(seq))), (len(sites) - 1, int(chosen.integers(seq)))}
    cells |= {(int(chosen.integers(len(sites))), int(chosen.integers(seq)))}
    misses: dict[str, list[float]] = {}
    for site, pos in sorted(cells):
        x, reference = (
            as_float64(acts[sites[site]][:, pos]).numpy()
            for acts in (seen.acts, seen.reference_acts)
        )
        for name, miss in _cell(record, x, reference, labels, cut, method, (site, pos)).items():
            misses.setdefault(name, []).append(miss)
    checks = [
        Check.at_most(f"{name} is that of another fit", max(found), 1e-3)
        for name, found in misses.items()
    ]
    held = len(labels) - cut
    best = max(max(row) for row in record.values["accuracy_shuffled"])
    allowed = CONTROL_ERRORS * math.sqrt(0.25 / held)
    checks.append(Check.at_most("no reader reads shuffled labels", max(0.0, best - 0.5), allowed))
    if "bayes_accuracy" in record.values:
        checks += _bayes(seen, record, torch.from_numpy(labels[cut:]))
    return checks


def _cell(
    record: Record,
    x: Float[np.ndarray, "n d_model"],
    reference: Float[np.ndarray, "n d_model"],
    labels: Bool[np.ndarray, " n"],
    cut: int,
    method: str,
    cell: tuple[int, int],
) -> dict[str, float]:
    """By how much the stored figures of a site and position miss those of a fit made here."""
    site, pos = cell
    ours, first = (fit_reader(each[:cut], labels[:cut], method) for each in (x, reference))
    held, truth = x[cut:], labels[cut:]
    along = held @ ours.direction
    sided = ((along > ours.threshold) == truth).mean()
    pairs = along[truth][:, None] - along[~truth][None, :]
    ranked = ((pairs > 0) + 0.5 * (pairs == 0)).mean() if pairs.size else math.nan
    moved = held @ first.direction
    size = max(1.0, float(np.abs(moved).max()))
    stored = record.values
    # a sequence that lies on the threshold, as they all do where the token is the same, may be
    # counted on either side
    near = (np.abs(along - ours.threshold) < 1e-4 * (1 + np.abs(along))).mean()
    tied = (np.abs(pairs) < 1e-5 * (1 + np.abs(along).max())).mean() if pairs.size else 0.0
    separable = (
        np.linalg.norm(x[:cut][labels[:cut]].mean(0) - x[:cut][~labels[:cut]].mean(0)) > 1e-4
    )
    found = {
        "accuracy": max(0.0, abs(stored["accuracy"][site][pos] - sided) - near),
        "auc": max(0.0, abs(stored["auc"][site][pos] - ranked) - tied),
    }
    if separable:
        axis = as_float64(record.tensors["direction"][site, pos]).numpy()
        first_axis = as_float64(record.tensors["reference_direction"][site, pos]).numpy()
        means = [stored[f"{side}_projection"][site][pos] for side in ("positive", "negative")]
        expected = [moved[truth].mean(), moved[~truth].mean()]
        cosine = stored["cosine_with_reference"][site][pos]
        found |= {
            "direction": 1 - float(axis @ ours.direction),
            "the reference's direction": 1 - float(first_axis @ first.direction),
            "projection": float(np.abs(np.subtract(means, expected)).max()) / size,
            "cosine": abs(cosine - float(ours.direction @ first.direction)),
        }
    return found


def fit_reader(
    x: Float[np.ndarray, "n d_model"], labels: Bool[np.ndarray, " n"], method: str
) -> Reader:
    """Difference of the class means, by itself or in units of the covariance within classes."""
    up, down = x[labels].mean(0), x[~labels].mean(0)
    axis = up - down
    if method == "lda":
        within = x - np.where(labels[:, None], up, down)
        covariance = np.cov(within, rowvar=False, bias=True)
        variance = max(np.trace(covariance) / x.shape[1], 1e-12)
        axis = np.linalg.solve(covariance + RIDGE * variance * np.eye(x.shape[1]), axis)
    axis = axis / max(np.linalg.norm(axis), 1e-12)
    return Reader(axis, float((up + down) @ axis / 2))


def _bayes(seen: Observation, record: Record, held_labels: Bool[Tensor, " held"]) -> list[Check]:
    """Bayes' rule and its names, from prefixes that end at the position itself."""
    tokens, held = seen.text.tokens, len(held_labels)
    slots = seen.truth.grammar.slots
    named = [name.split(" ")[0] for name in record.values["slots"]]
    apart = sum(a != slot.name for a, slot in zip(named, slots, strict=False))
    miss, informed = 0.0, 0
    for pos in sorted({0, tokens.shape[1] // 2, tokens.shape[1] - 1}):
        belief, mask = seen.truth.beliefs(tokens[-held:, : pos + 1])
        belief, mask = belief[:, -1].cpu(), mask[:, -1].cpu()
        right = ((belief > 0.5) == held_labels).double().mean()
        miss = max(miss, gap(record.values["bayes_accuracy"][pos], right))
        knows = bool(((belief - 0.5).abs() > 1e-9).any() and mask.all())
        informed += knows != record.values["informed"][pos]
    return [
        Check.at_most("Bayes' accuracy is that of the prefixes", miss, 1e-4),
        Check.at_most("positions that inform are marked", informed, 0),
        Check.at_most("slots are those of the grammar", apart, 0),
    ]
