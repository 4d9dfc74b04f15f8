"""Readings of a bundled language model by linear probes, with intervals: reported, not bounded."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.models import load_model
from rlhf_lab.probes import ReelTruth
from rlhf_lab.probes.direction import fit_direction, paired_excess, project
from rlhf_lab.probes.direction_probe import LAYER_SITES
from rlhf_lab.probes.value_lens import RESIDUAL_SITES, fit_ridge, r_squared
from rlhf_lab.training.capture import capture_activations

VALUE_SLOTS = ("CONN 2", "CONN 3", "ADJ 3", "STOP", "I")
RIDGE = 1e-6
N_BOOTSTRAP = 400
STANDARD_ERRORS = 1.96
INFORMS = 1e-6
"""Variance of the reward, in units of the reward squared, that a word has to settle to inform."""


class Reading(NamedTuple):
    """One figure of one model, and its 95 % interval over the reviews that were held out."""

    name: str
    value: float
    low: float
    high: float


def readings(name: str, n_reviews: int, seed: int) -> list[Reading]:
    """Read a bundled model, in the best layer of each slot.

    1. At the connectors, and from the last adjective to the word before the verdict: R2 of the
       exact value, by ridge regression.
    2. At each word that informs: the accuracy of telling good from bad reviews by a direction (LDA)
       and a threshold, less that of Bayes' rule on the same reviews.

    Two thirds of the reviews are fitted, one third is measured. The best layer is chosen on the
    latter, too, which flatters it a little.
    """
    truth, model = ReelTruth(), load_model(name)
    tokens, positive = truth.reviews(n_reviews, seed=seed)
    slots, cut = truth.slot_names(tokens.shape[1]), 2 * n_reviews // 3
    values, _ = truth.values(tokens)
    residuals = torch.stack(list(capture_activations(model, tokens, RESIDUAL_SITES).values()))
    found = [
        value_reading(f"R2 of the value at {slot}", residuals[:, :, t], values[:, t], cut)
        for slot, t in ((slot, slots.index(slot)) for slot in VALUE_SLOTS)
    ]
    layers = torch.stack(list(capture_activations(model, tokens, LAYER_SITES).values()))
    best = truth.beliefs(tokens)[0] > 0.5
    for t, variance in enumerate(truth.information.tolist()):
        if variance > INFORMS:
            measured = f"accuracy less Bayes at {slots[t]}"
            found.append(verdict_reading(measured, layers[:, :, t], best[:, t], positive, cut))
    return found


def value_reading(
    name: str, x: Float[Tensor, "site batch d_model"], y: Float[Tensor, " batch"], cut: int
) -> Reading:
    """R2 on the rows from `cut` on, with the interval that resampling these rows gives."""
    everywhere = torch.ones(cut, dtype=torch.bool).expand(len(x), cut)
    slope, intercept = fit_ridge(x[:, :cut], y[:cut].expand(len(x), cut), everywhere, RIDGE)
    predicted = (x[:, cut:].double() @ slope[..., None])[..., 0] + intercept[:, None]
    true = y[cut:].double()
    counted = torch.ones_like(predicted, dtype=torch.bool)
    r2, _ = r_squared(predicted, true.expand_as(predicted), counted)
    best = predicted[int(r2.argmax())]
    draws = torch.randint(
        len(true), (N_BOOTSTRAP, len(true)), generator=torch.Generator().manual_seed(0)
    )
    resampled, _ = r_squared(best[draws], true[draws], torch.ones_like(draws, dtype=torch.bool))
    low, high = resampled.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Reading(name, float(r2.max()), low, high)


def verdict_reading(
    name: str,
    x: Float[Tensor, "site batch d_model"],
    best: Bool[Tensor, " batch"],
    positive: Bool[Tensor, " batch"],
    cut: int,
) -> Reading:
    """Accuracy less that of the best rule on the rows from `cut` on, paired (McNemar 1947)."""
    fitted = fit_direction(x[:, :cut], positive[:cut], "lda")
    decided = project(x[:, cut:], fitted.direction) > fitted.threshold[:, None]
    excess, error = paired_excess(decided, best[cut:].expand_as(decided), positive[cut:])
    site = int(excess.argmax())
    value, spread = float(excess[site]), STANDARD_ERRORS * float(error[site])
    return Reading(name, value, value - spread, value + spread)
