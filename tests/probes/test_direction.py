"""Directions by hand and on two Gaussians, their floor of noise, and records of short runs."""

import dataclasses

import pytest
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.functional import bootstrap_interval
from rlhf_lab.organism.lexicon import WORD_IDS
from rlhf_lab.probes import Direction, EvalText, FrozenProbe, Observation, ReelTruth, attach
from rlhf_lab.probes.direction import ablate, fit_direction, fit_each_site, project
from rlhf_lab.probes.direction_probe import Split, _by_halves, accuracy_interval, is_right
from rlhf_lab.probes.probe import RESAMPLES
from tests.probes.looking import train_soundly


def two_gaussians(
    n: int, axis: Float[Tensor, " d_model"], distance: float, seed: int
) -> tuple[Float[Tensor, "n d_model"], Bool[Tensor, " n"]]:
    """Two classes of variance 1, whose means are `distance` apart along an axis."""
    generator = torch.Generator().manual_seed(seed)
    x, labels = torch.randn(n, len(axis), generator=generator), torch.arange(n) % 2 == 0
    order = torch.randperm(n, generator=generator)
    return x + torch.where(labels, 0.5, -0.5)[order, None] * distance * axis, labels[order]


def read(x: Tensor, labels: Tensor, cut: int, method: str = "mean") -> float:
    """Accuracy on rows after a cut."""
    split = Split(x[:cut], labels[:cut], x[cut:], labels[cut:])
    return is_right(split, fit_direction(*split[:2], method)).double().mean().item()


def test_ablation_removes_one_direction_only():
    x = torch.tensor([[3.0, 4.0], [-1.0, 2.0]])
    assert ablate(x, torch.tensor([1.0, 0.0])).tolist() == [[0.0, 4.0], [0.0, 2.0]]
    d = torch.tensor([0.6, 0.8])
    assert project(ablate(x, d), d).abs().max() < 1e-6


def test_fit_of_unequal_classes_matches_hand_computed():
    x, labels = torch.tensor([[1.0, 5], [2, 5], [3, 5], [6, 5]]), torch.arange(4) == 3
    assert [part.tolist() for part in fit_direction(x, labels)] == [[1.0, 0.0], 4.0]


@pytest.mark.usefixtures("no_type_checks")
def test_frozen_directions_are_those_of_the_reference():
    labels = torch.arange(300) % 3 == 0
    ours, first = torch.randn(2, 300, 4, generator=torch.Generator().manual_seed(0))
    ours[labels, 0] += 6
    first[labels, 1] += 6
    tokens = torch.zeros(300, 1, dtype=torch.long)
    text = EvalText.of(tokens, torch.ones_like(tokens).bool(), labels)
    named = dict.fromkeys(field.name for field in dataclasses.fields(Observation))
    for probe in (Direction(), FrozenProbe()):
        acts = [x[:, None] if isinstance(probe, Direction) else x for x in (ours, first)]
        acts = dict(zip(("acts", "reference_acts"), ({"site": x} for x in acts), strict=True))
        values = probe.observe(Observation(**named | acts | {"text": text})).values
        found = torch.tensor(values["accuracy_frozen"]).item()
        refitted = torch.tensor(values.get("accuracy", 1)) - torch.tensor(values.get("gap", 0))
        assert found < 0.8 and refitted.item() > 0.98


def test_interval_of_the_accuracy_is_over_held_out_sequences():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 60, 5, generator=generator)
    labels = torch.rand(60, generator=generator) < 0.5
    split = Split(x[:, :, :40], labels[:40], x[:, :, 40:], labels[40:])
    fitted = fit_each_site(split.x, split.labels, "mean")
    found = accuracy_interval(split, fitted)
    assert found.n == 20 and found.value.shape == (2, 3)
    decided = split.held[1, 2].double() @ fitted.direction[1, 2] > fitted.threshold[1, 2]
    one = bootstrap_interval((decided == split.held_labels).double(), resamples=RESAMPLES)
    assert str(found[1, 2]) == str(one)


@pytest.mark.parametrize(
    ("shape", "labels", "message"),
    [
        ((3, 2), [True] * 3, "labels are all True"),
        ((6, 5, 4), [True, False] * 3, "Pass activations at one position"),
        ((6, 4), [1.0, 0.0] * 3, "Pass activations at one position"),
    ],
)
@pytest.mark.usefixtures("no_type_checks")
def test_invalid_labels_raise(shape, labels, message):
    with pytest.raises(ValueError, match=message):
        fit_direction(torch.randn(shape), torch.tensor(labels))


@pytest.mark.parametrize(
    ("n", "method", "low", "high"),
    [(400, "mean", 0.9, 1), (36, "lda", -1, 0.5), (800, "lda", 0.9, 1)],
)
def test_split_halves_are_the_floor_of_the_cosine(n, method, low, high):
    """A turn by 60 degrees is below the floor of means of 400 rows; few rows have no floor."""
    turned = torch.zeros(16)
    turned[:2] = torch.tensor([0.5, 0.75**0.5])
    x, labels = two_gaussians(n, turned, 3.0, seed=2)
    halves, unequal = _by_halves(Split(x[None, None], labels, x[None, None], labels), method)
    assert low < halves["split_half_cosine"][0][0] < high and unequal < 1e-9
    if method == "mean":
        before = fit_direction(*two_gaussians(n, torch.eye(16)[0], 3.0, seed=1)).direction
        assert abs(before @ fit_direction(x, labels).direction - 0.5) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("probe", [Direction("plot", every=1), FrozenProbe(every=1)])
def test_labels_other_than_the_sentiment_have_no_bayes_rule(make_trainer, probe):
    """The noun of the first clause, which is linearly readable."""
    tokens, sentiment = ReelTruth().reviews(192, seed=3)
    of_plot = tokens[:, ReelTruth().grammar.slot("ASP", 0)] == WORD_IDS["plot"]
    assert ReelTruth().fits(tokens, sentiment) and not ReelTruth().fits(tokens, of_plot)
    trainer = make_trainer(total_phases=1, warmup_steps=0)
    attach(trainer, probe, eval_tokens=tokens, labels=of_plot)
    assert "bayes_accuracy" not in train_soundly(trainer).records(probe.name)[-1]
