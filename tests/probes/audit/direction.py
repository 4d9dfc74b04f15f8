"""Checks of Direction's record: some of its cells fitted and counted again, and the control."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.probes.probe import Check, Observation, Record
from tests.probes.audit.anew import as_float64, gap
from tests.probes.audit.labels import check_slots

CONTROL_ERRORS = 4.5
"""Standard errors by which the best of all cells may read labels that were shuffled."""
RIDGE = 1e-4
OF_ALL_CELLS = ("sites", "sequences", "slots", "informed", "bayes_accuracy")
CONTROLLED_BY = ("control_labels", "random_direction")
OF_ALL_CELLS += CONTROLLED_BY


def larger_class(labels: Bool[np.ndarray, " n"]) -> float:
    """The accuracy of always saying what is more frequent."""
    return max(float(labels.mean()), 1 - float(labels.mean()))


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
    seq = int(seen.text.attention_mask.all(0).sum())
    cells = {(0, int(chosen.integers(seq))), (len(sites) - 1, int(chosen.integers(seq)))}
    cells |= {(int(chosen.integers(len(sites))), int(chosen.integers(seq)))}
    misses: dict[str, list[float]] = {}
    for site, pos in sorted(cells):
        x, reference = (
            as_float64(acts[sites[site]][:, pos]).numpy()
            for acts in (seen.acts, seen.reference_acts)
        )
        stored = {
            name: grid[site][pos]
            for name, grid in (record.values | record.tensors).items()
            if name not in OF_ALL_CELLS
        } | {name: as_float64(record.tensors[name]).numpy() for name in CONTROLLED_BY}
        cell = Cell(stored, x, reference, labels, cut, method)
        for name, miss in (_refitted(cell) | _erased(cell)).items():
            misses.setdefault(name, []).append(miss)
    checks = [
        Check.at_most(f"{name} is that of another fit", max(found), 1e-3)
        for name, found in misses.items()
    ]
    held = len(labels) - cut
    best = max(max(row) for row in record.values["accuracy_shuffled"])
    allowed = CONTROL_ERRORS * math.sqrt(0.25 / held)
    excess = max(0.0, best - larger_class(labels))
    checks.append(Check.at_most("no reader reads shuffled labels", excess, allowed))
    if "bayes_accuracy" in record.values:
        checks += _bayes(seen, record, torch.from_numpy(labels[cut:]))
    return checks


class Cell(NamedTuple):
    """A site and position: what is stored of it, and the activations there.

    Args:
        cut: so many sequences are fitted; the rest is held out.
    """

    stored: dict[str, Any]
    x: Float[np.ndarray, "n d_model"]
    reference: Float[np.ndarray, "n d_model"]
    labels: Bool[np.ndarray, " n"]
    cut: int
    method: str


def _refitted(cell: Cell) -> dict[str, float]:
    """By how much the figures of both readers miss those of fits made here."""
    stored, labels, cut = cell.stored, cell.labels[: cell.cut], cell.cut
    ours, first = (fit_reader(x[:cut], labels, cell.method) for x in (cell.x, cell.reference))
    held, truth = cell.x[cut:], cell.labels[cut:]
    along, moved = held @ ours.direction, held @ first.direction
    pairs = along[truth][:, None] - along[~truth][None, :]
    ranked = ((pairs > 0) + 0.5 * (pairs == 0)).mean() if pairs.size else math.nan
    tied = (np.abs(pairs) < 1e-5 * (1 + np.abs(along).max())).mean() if pairs.size else 0.0
    found = {
        "accuracy": missed_right(stored["accuracy"], ours, held, truth),
        "auc": max(0.0, abs(stored["auc"] - ranked) - tied),
    }
    if not all(_separable(x[:cut], labels) for x in (cell.x, cell.reference)):
        return found  # where the token is always the same, rounding chooses the direction
    random = stored["random_direction"]
    halfway = [(cell.x[:cut] @ random)[kind].mean() for kind in (labels, ~labels)]
    noise = Reader(random, float(sum(halfway)) / 2)
    discriminant = fit_reader(cell.x[:cut], labels, "lda")
    axis, first_axis = (
        as_float64(stored[name]).numpy() for name in ("direction", "reference_direction")
    )
    means = [stored[f"{side}_projection"] for side in ("positive", "negative")]
    apart = np.abs(np.subtract(means, [moved[truth].mean(), moved[~truth].mean()])).max()
    return found | {
        "direction": 1 - float(axis @ ours.direction),
        "the reference's direction": 1 - float(first_axis @ first.direction),
        "projection": float(apart) / max(1.0, float(np.abs(moved).max())),
        "the frozen reader's accuracy": missed_right(stored["accuracy_frozen"], first, held, truth),
        "the random direction's accuracy": missed_right(
            stored["accuracy_random"], noise, held, truth
        ),
        "the control's accuracy": _control(cell),
        "the discriminant's accuracy": missed_right(
            stored["accuracy_lda"], discriminant, held, truth
        ),
        "cosine": abs(stored["cosine_with_reference"] - float(ours.direction @ first.direction)),
    }


def _control(cell: Cell) -> float:
    """By how much the accuracy on shuffled labels misses that of a fit to the stored ones."""
    shuffled = cell.stored["control_labels"] > 0.5
    if shuffled.sum() != cell.labels.sum() or (shuffled == cell.labels).all():
        return math.nan  # not the labels in another order
    fitted, held = shuffled[: cell.cut], shuffled[cell.cut :]
    reader = fit_reader(cell.x[: cell.cut], fitted, cell.method)
    return missed_right(cell.stored["accuracy_shuffled"], reader, cell.x[cell.cut :], held)


def _erased(cell: Cell) -> dict[str, float]:
    """By how much the floor of the cosine and the erasures miss those made here.

    LEACE is made as in its paper, by whitening: the covariance's root, a projection off the
    whitened difference of the means, and back.
    """
    if "split_half_cosine" not in cell.stored:
        return {}
    stored, cut = cell.stored, cell.cut
    x, labels = cell.x[:cut][::2], cell.labels[:cut][::2]
    rest, other = cell.x[:cut][1::2], cell.labels[:cut][1::2]
    if not (_separable(x, labels) and _separable(rest, other)):
        return {}
    held, truth = cell.x[cut:], cell.labels[cut:]
    ours = fit_reader(x, labels, cell.method)
    floor = ours.direction @ fit_reader(rest, other, cell.method).direction
    covariance = _with_ridge(np.cov(x, rowvar=False, bias=True))
    values, vectors = np.linalg.eigh(covariance)
    root, inverse = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
    white = inverse @ (x[labels].mean(0) - x[~labels].mean(0))
    off = root @ np.outer(white, white) @ inverse / (white @ white)
    ways = {
        "ablated": lambda acts: acts - np.outer(acts @ ours.direction, ours.direction),
        "erased": lambda acts: acts - (acts - x.mean(0)) @ off.T,
    }
    found = {"the floor of the cosine": abs(stored["split_half_cosine"] - float(floor))}
    for name, erase in ways.items():
        reader = fit_reader(erase(rest), other, "lda")
        found[f"accuracy where it is {name}"] = missed_right(
            stored[f"accuracy_{name}"], reader, erase(held), truth
        )
    return found


def missed_right(
    stored: float,
    reader: Reader,
    x: Float[np.ndarray, "n d_model"],
    labels: Bool[np.ndarray, " n"],
) -> float:
    """How far an accuracy is off, beyond the sequences that rounding may put on either side."""
    along = x @ reader.direction
    right = ((along > reader.threshold) == labels).mean()
    near = (np.abs(along - reader.threshold) < 1e-4 * (1 + np.abs(along))).mean()
    return max(0.0, abs(stored - right) - near)


def _separable(x: Float[np.ndarray, "n d_model"], labels: Bool[np.ndarray, " n"]) -> bool:
    """Whether the classes' means differ by more than rounding."""
    return bool(np.linalg.norm(x[labels].mean(0) - x[~labels].mean(0)) > 1e-4)


def _with_ridge(covariance: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d d"]:
    """A covariance with a share of its mean variance added to each variance."""
    variance = max(np.trace(covariance) / len(covariance), 1e-12)
    return covariance + RIDGE * variance * np.eye(len(covariance))


def fit_reader(
    x: Float[np.ndarray, "n d_model"], labels: Bool[np.ndarray, " n"], method: str
) -> Reader:
    """Difference of the class means, by itself or in units of the covariance within classes."""
    up, down = x[labels].mean(0), x[~labels].mean(0)
    axis = up - down
    if method == "lda":
        within = x - np.where(labels[:, None], up, down)
        axis = np.linalg.solve(_with_ridge(np.cov(within, rowvar=False, bias=True)), axis)
    axis = axis / max(np.linalg.norm(axis), 1e-12)
    return Reader(axis, float((up + down) @ axis / 2))


def _bayes(seen: Observation, record: Record, held_labels: Bool[Tensor, " held"]) -> list[Check]:
    """Bayes' rule and its names, from prefixes that end at the position itself."""
    seq, held = int(seen.text.attention_mask.all(0).sum()), len(held_labels)
    tokens = seen.text.tokens[:, :seq]
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
        check_slots(seen, record),
    ]
