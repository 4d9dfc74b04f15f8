"""FrozenProbe: persona drift, read at one slot by a linear probe that is fitted in phase 0 only."""

import torch
from jaxtyping import Bool
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.models.device import where_exact
from rlhf_lab.probes.direction import cosine_interval, fit_direction, project
from rlhf_lab.probes.direction_probe import LAYER_SITES, Split, control_accuracy, is_right
from rlhf_lab.probes.probe import (
    RESAMPLES,
    Check,
    Observation,
    Probe,
    Record,
    decimals,
    interval_fields,
    mean_fields,
)
from rlhf_lab.training import RLHFTrainer


class FrozenProbe(Probe):
    """A classifier of a label at one slot, fitted to the reference once.

    It is the difference of class means d_0 with its threshold, at each site, fitted to the first
    two thirds of the eval text and tested on the rest. In addition to `Direction`, which has one
    accuracy per layer and position, it records:

    - the accuracy of the frozen classifier, its gap to a refitted one on the same sequences, each
      with its interval, and the fraction that it calls positive;
    - the interval of the cosine of both directions, and the cosine of two halves' (the floor);
    - the shift of the activations along d_0, and the cosine of the shift with d_0;
    - a control: shuffled labels;
    - on Reel, Bayes' accuracy.

    Checks: the shift is the change of the mean projection.

    Args:
        pos: position of the slot; -1 for the last, in texts of one length.
    """

    name = "frozen_probe"
    question = "Does a classifier of phase 0 still read the policy?"
    caveat = "A fall means that the label is represented differently, not that it is gone."
    text = "eval"
    sites = LAYER_SITES
    every = 5
    needs_labels = True
    options = ("pos", *Probe.options)
    pos = -1

    def check_run(self, trainer: RLHFTrainer) -> None:
        if trainer.args.reset_reference_every is not None:
            raise ConfigError(
                f"reset_reference_every={trainer.args.reset_reference_every} changes the reference "
                f"that {self.name} was fitted to. Leave it None, or leave out the probe."
            )

    def observe(self, seen: Observation) -> Record:
        labels = seen.text.labels
        columns = seen.text.columns(self.pos).unique().tolist()
        if len(columns) > 1:
            raise ConfigError(
                f"pos={self.pos} of {self.name} is at several slots of texts of unequal length "
                f"({columns[0]} to {columns[-1]}). Count from the front."
            )
        cut, sites = 2 * len(labels) // 3, list(seen.acts)
        x, first = (
            where_exact(torch.stack([acts[site] for site in sites])).double()
            for acts in (seen.acts, seen.reference_acts)
        )
        labels = labels.to(x.device)
        ours, theirs = (
            Split(acts[:, :cut], labels[:cut], acts[:, cut:], labels[cut:]) for acts in (x, first)
        )
        frozen, refit = (fit_direction(each.x, each.labels) for each in (theirs, ours))
        moved = ours.held - theirs.held
        along, mean = project(moved, frozen.direction), moved.mean(1)
        right = is_right(ours, frozen).double()
        sides = ours.labels, ~ours.labels
        positive, negative = (theirs.x[:, side].mean(1) for side in sides)
        halves = [fit_direction(ours.x[:, half], ours.labels[half]) for half in halves_of(sides)]
        cosines = {
            "moved_cosine": (mean * frozen.direction).sum(-1) / mean.norm(dim=-1),
            "split_half": (halves[0].direction * halves[1].direction).sum(-1),
            "cosine": (frozen.direction * refit.direction).sum(-1),
        }
        means = {
            "accuracy_frozen": right,
            "gap": right - is_right(ours, refit).double(),
            "called": (right == ours.held_labels).double(),  # right of True, or wrong of False
            "shift": along,
        }
        values = {
            "size": decimals((positive - negative).norm(dim=-1)),
            "positive": round(labels[cut:].double().mean().item(), 4),
            **{name: decimals(cosine, 4) for name, cosine in cosines.items()},
            **interval_fields("cosine", cosine_interval(ours.x, theirs.x, ours.labels, RESAMPLES)),
            "sites": sites,
            "position": columns[0],
            "sequences": {"fitted": cut, "held": len(labels) - cut},
            "accuracy_control": control_accuracy(ours, "mean"),
        }
        for name, rows in means.items():
            values |= mean_fields(name, rows.T, 4)

        def check_shift() -> Check:
            now, before = (project(each.held, frozen.direction).mean(1) for each in (ours, theirs))
            gap = (torch.tensor(values["shift"]) - (now - before).cpu()).abs().max()
            return Check.at_most("the shift is the change of the mean projection", gap, 1e-4)

        if seen.truth_fits_labels:
            tokens, pos = seen.text.tokens, columns[0]
            belief = seen.truth.beliefs(tokens)[0][cut:, pos].to(labels.device)
            right = ((belief > 0.5) == labels[cut:]).double()[:, None]
            values |= {"slot": seen.truth.slot_names(tokens.shape[1])[pos]}
            values |= mean_fields("bayes_accuracy", right, 4)
        return Record(values, checks=[check_shift])


def halves_of(
    sides: tuple[Bool[Tensor, " n"], Bool[Tensor, " n"]],
) -> tuple[Bool[Tensor, " n"], Bool[Tensor, " n"]]:
    """Return two halves of the sequences, each with every other one of either class."""
    odd = sum((side & (side.cumsum(0) % 2 == 1)) for side in sides) > 0
    return odd, ~odd
