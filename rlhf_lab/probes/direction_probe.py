"""Direction: linear probe for a label in the residual stream, its controls, and its drift."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import Interval, auc, bootstrap_means
from rlhf_lab.models.device import where_exact
from rlhf_lab.probes.direction import (
    Fitted,
    Method,
    ablate,
    fit_direction,
    fit_each_site,
    project,
)
from rlhf_lab.probes.erasure import fit_leace
from rlhf_lab.probes.probe import (
    RESAMPLES,
    Check,
    Observation,
    Probe,
    Record,
    decimals,
    interval_fields,
)

LAYER_SITES = ("blocks.0.hook_resid_pre", "blocks.*.hook_resid_post")


class Direction(Probe):
    """The direction of a label in the residual stream, by layer and position, in all eval texts.

    For the direction that `method` fits, on held-out sequences:

    - accuracy and AUC; the accuracy of the reference's direction and threshold on the policy's
      activations (`accuracy_frozen`), which falls if the label is represented differently;
    - the cosine with the reference's direction, and that of fits to two halves of the same
      activations (`split_half_cosine`), the floor of noise;
    - the projection of both classes on the reference's direction;
    - a control: shuffled labels (Hewitt and Liang 2019, arXiv 1909.03368).

    Also the accuracy of Fisher's discriminant (`accuracy_lda`), on other sequences after ablation
    of the direction (`accuracy_ablated`) or erasure by LEACE (`accuracy_erased`); Bayes' on Reel.

    Checks: LEACE makes the class means equal.

    Args:
        label: meaning of the eval labels; Bayes' rule is known for "sentiment" only.
        method: "mean" or "lda".

    Raises:
        ConfigError: If the method is unknown.
    """

    name = "direction"
    question = "Where is the label a direction, and does training turn it?"
    caveat = "A direction that predicts the label need not cause behavior."
    text = "eval"
    sites = LAYER_SITES
    every = 5
    needs_labels = True
    options = ("label", "method", *Probe.options)
    label, method = "sentiment", "mean"

    def __init__(self, *values: Any, **named: Any) -> None:
        super().__init__(*values, **named)
        self.name = f"direction_{self.label}" if self.name == "direction" else self.name
        if self.method not in ("mean", "lda"):
            raise ConfigError(f"method={self.method!r} of {self.name} must be 'mean' or 'lda'.")

    def settings(self) -> dict:
        return super().settings() | {"method": self.method}

    def observe(self, seen: Observation) -> Record:
        labels = seen.text.labels
        cut, seq = 2 * len(labels) // 3, seen.text.common().tokens.shape[1]
        x, reference = (
            where_exact(torch.stack([acts[site][:, :seq] for site in seen.acts]).transpose(1, 2))
            for acts in (seen.acts, seen.reference_acts)
        )
        labels = labels.to(x.device)
        ours = Split(x[:, :, :cut], labels[:cut], x[:, :, cut:], labels[cut:])
        fitted = fit_each_site(ours.x, ours.labels, self.method)
        first = fit_each_site(reference[:, :, :cut], ours.labels, self.method)
        held, positive = ours.held, ours.held_labels
        moved = project(held, first.direction)
        halves, unequal = _by_halves(ours, self.method)
        values = {
            "sites": list(seen.acts),
            "sequences": {"fitted": cut, "held": len(positive)},
            "accuracy": _accuracy(ours, fitted),
            **interval_fields("accuracy", accuracy_interval(ours, fitted)),
            "auc": decimals(auc(project(held, fitted.direction), positive), 4),
            "accuracy_frozen": _accuracy(ours, first),
            "cosine_with_reference": decimals((fitted.direction * first.direction).sum(-1), 4),
            **halves,
            "accuracy_shuffled": control_accuracy(ours, self.method),
            "accuracy_lda": _accuracy(ours, fit_each_site(ours.x, ours.labels, "lda")),
            "positive_projection": decimals(moved[..., positive].mean(-1), 4),
            "negative_projection": decimals(moved[..., ~positive].mean(-1), 4),
        }
        if self.label == "sentiment" and seen.truth_fits_labels:
            tokens = seen.text.common().tokens
            belief, mask = (x[cut:].T.to(positive.device) for x in seen.truth.beliefs(tokens))
            informed = ((belief - 0.5).abs() > 1e-9).any(1) & mask.all(1)
            values |= {
                "bayes_accuracy": decimals(((belief > 0.5) == positive).double().mean(-1), 4),
                "informed": informed.tolist(),
                "slots": seen.truth.slot_names(tokens.shape[1]),
            }
        check = lambda: Check.at_most("LEACE leaves both classes one mean", unequal, 1e-6)
        return Record(values, {"direction": fitted.direction.float()}, [check])


class Split(NamedTuple):
    """Activations and labels to fit on, and those that are held out."""

    x: Float[Tensor, "*site fit d_model"]
    labels: Bool[Tensor, " fit"]
    held: Float[Tensor, "*site test d_model"]
    held_labels: Bool[Tensor, " test"]


def is_right(split: Split, fitted: Fitted) -> Bool[Tensor, "*site test"]:
    """Return whether a direction and its threshold predict the label of each held-out sequence."""
    along = project(split.held, fitted.direction)
    return (along > fitted.threshold[..., None]) == split.held_labels


def _accuracy(split: Split, fitted: Fitted) -> list:
    return decimals(is_right(split, fitted).double().mean(-1), 4)


def accuracy_interval(split: Split, fitted: Fitted) -> Interval:
    """Return the accuracy of each site and position, with its interval over held-out sequences."""
    return bootstrap_means(is_right(split, fitted).movedim(-1, 0), resamples=RESAMPLES)


def _by_halves(split: Split, method: Method) -> tuple[dict[str, list], float]:
    """Return fits to every other sequence: the floor of the cosine, and two erasures.

    The first half's direction is ablated, or its label erased by LEACE; Fisher's discriminant is
    fitted to the other half, tested on held-out sequences.
    """
    rows = [slice(start, None, 2) for start in (0, 1)]
    one, other = (split.labels[half] for half in rows)
    if any(bool(labels.all()) or not bool(labels.any()) for labels in (one, other)):
        return {}, 0.0
    names, unequal = ("split_half_cosine", "accuracy_ablated", "accuracy_erased"), 0.0
    found: dict[str, list] = {name: [] for name in names}
    for x, held in zip(split.x.double(), split.held.double(), strict=True):
        fitted, rest = x[..., rows[0], :], x[..., rows[1], :]
        axes = [fit_direction(*half, method).direction for half in ((fitted, one), (rest, other))]
        found["split_half_cosine"].append(decimals((axes[0] * axes[1]).sum(-1), 4))
        eraser = fit_leace(fitted, one)
        ways = {"ablated": lambda acts, axis=axes[0]: ablate(acts, axis), "erased": eraser.erase}
        for name, erase in ways.items():
            left = Split(erase(rest), other, erase(held), split.held_labels)
            fisher = fit_direction(left.x, left.labels, "lda")
            found[f"accuracy_{name}"].append(_accuracy(left, fisher))
        erased, size = eraser.erase(fitted), eraser.axis.norm(dim=-1)
        gap = (erased[..., one, :].mean(-2) - erased[..., ~one, :].mean(-2)).norm(dim=-1)
        unequal = max(unequal, torch.where(size > 1e-6, gap / size, 0.0).max().item())
    return found, unequal


def control_accuracy(split: Split, method: Method) -> list:
    """Return the accuracy of directions fitted to the shuffled labels of a quarter of the rows.

    In a fit to many rows, a leak of held-out labels would be faint.
    """
    generator = torch.Generator().manual_seed(0)
    every, n = torch.cat([split.labels, split.held_labels]), len(split.labels)
    every = every[torch.randperm(len(every), generator=generator).to(every.device)]
    few = max(8, min(n // 4, 4 * split.x.shape[-1]))
    few = few if 0 < every[:few].sum() < few else n  # both classes are needed
    control = Split(split.x[..., :few, :], every[:few], split.held, every[n:])
    return _accuracy(control, fit_each_site(control.x, control.labels, method))
