import math

import numpy as np
import pytest
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import auc, bootstrap_interval
from rlhf_lab.models import load_model
from rlhf_lab.organism.bundled import LANGUAGE_MODELS
from rlhf_lab.organism.lexicon import WORD_IDS
from rlhf_lab.probes import Direction, FrozenProbe, ReelTruth, Run, attach
from rlhf_lab.probes.direction import (
    ablate,
    accuracy,
    fit_direction,
    fit_each_site,
    paired_excess,
    project,
)
from rlhf_lab.probes.direction_probe import LAYER_SITES, Split, accuracy_interval
from rlhf_lab.probes.probe import RESAMPLES
from rlhf_lab.training.capture import capture_activations
from rlhf_lab.views.probe_pictures import probe_html


def planted_classes(
    n: int, direction: Float[Tensor, " d_model"], distance: float, seed: int
) -> tuple[Float[Tensor, "n d_model"], Bool[Tensor, " n"]]:
    """Two Gaussian clouds of variance 1, their means `distance` apart along a direction.

    The best possible accuracy is `gaussian_accuracy(distance)`.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 2 == 0
    noise = torch.randn(n, len(direction), generator=generator)
    signs = torch.where(labels, 0.5, -0.5)[:, None]
    return noise + signs * distance * direction / direction.norm(), labels


def gaussian_accuracy(distance: float) -> float:
    """Phi(distance / 2): the accuracy of the best rule for two Gaussians of variance 1."""
    return 0.5 * (1 + math.erf(distance / 2 / math.sqrt(2)))


@pytest.mark.parametrize("method", ["mean", "lda"])
def test_a_planted_direction_is_found_and_decides_as_well_as_can_be(method):
    d = torch.randn(16, generator=torch.Generator().manual_seed(0))
    x, labels = planted_classes(12_000, d, distance=2.0, seed=1)
    fitted = fit_direction(x[:8000], labels[:8000], method)
    assert (fitted.direction.float() @ d / d.norm()).item() > 0.99
    found = accuracy(project(x[8000:], fitted.direction), fitted.threshold, labels[8000:]).item()
    # Phi(1) = 0.8413; the standard error of 4,000 held-out decisions is 0.0058.
    assert gaussian_accuracy(2.0) == pytest.approx(0.8413, abs=1e-4)
    assert abs(found - gaussian_accuracy(2.0)) < 3 * 0.0058 + 0.005


def test_lda_allows_for_noise_that_the_mean_difference_falls_for():
    d = torch.tensor([1.0, 0.0])
    x, labels = planted_classes(4000, d, distance=2.0, seed=2)
    x = x @ torch.tensor([[1.0, 3.0], [0.0, 1.0]])
    by_mean, by_lda = (
        accuracy(project(x, f.direction), f.threshold, labels).item()
        for f in (fit_direction(x, labels, method) for method in ("mean", "lda"))
    )
    # The shear keeps both classes Gaussian; undoing it gives back Phi(1) = 0.841.
    assert by_lda > 0.82
    assert by_mean < by_lda + 1e-9


def test_shuffled_labels_decide_by_chance():
    x, labels = planted_classes(2000, torch.ones(256), distance=3.0, seed=3)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
    shuffled = fit_direction(x[:1000], labels[:1000][order])
    real = fit_direction(x[:1000], labels[:1000])
    by_shuffled, by_real = (
        accuracy(project(x[1000:], f.direction), f.threshold, labels[1000:]).item()
        for f in (shuffled, real)
    )
    # A direction of noise has a cosine of about 0.11 (1 / 16, times the spread of both classes
    # together) with the real one, and decides right with Phi(1.5 * 0.11) = 0.57: 3 such are 0.2.
    assert abs(by_shuffled - 0.5) < 0.2
    # The real one has a cosine of 0.95: Phi(1.5 * 0.95) = 0.92.
    assert by_real > 0.88


def test_ablation_takes_away_one_direction_and_nothing_else():
    x = torch.tensor([[3.0, 4.0], [-1.0, 2.0]])
    assert ablate(x, torch.tensor([1.0, 0.0])).tolist() == [[0.0, 4.0], [0.0, 2.0]]
    d = torch.tensor([0.6, 0.8])
    assert project(ablate(x, d), d).abs().max() < 1e-6


def test_auc_counts_pairs_and_half_of_ties():
    labels = torch.tensor([True, True, False, False])
    # pairs: 1 > 0, 1 < 2, 3 > 0, 3 > 2 -> 3 of 4; then 1 = 1 counts half: 1 + 0.5 + 1 + 1 of 4
    assert auc(torch.tensor([1.0, 3.0, 0.0, 2.0]), labels).item() == 0.75
    assert auc(torch.tensor([1.0, 3.0, 0.0, 1.0]), labels).item() == 0.875


def test_the_interval_of_the_accuracy_is_over_held_out_sequences():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 60, 5, generator=generator)
    labels = torch.rand(60, generator=generator) < 0.5
    split = Split(x[:, :, :40], labels[:40], x[:, :, 40:], labels[40:])
    fitted = fit_each_site(split.x, split.labels, "mean")
    found = accuracy_interval(split, fitted)
    assert found.n == 20 and found.value.shape == (2, 3)
    right = [
        float((h @ fitted.direction[1, 2] > fitted.threshold[1, 2]) == label)
        for h, label in zip(split.held[1, 2].double(), split.held_labels, strict=True)
    ]
    one = bootstrap_interval(torch.tensor(right), resamples=RESAMPLES)
    assert str(found[1, 2]) == str(one)


def test_the_excess_over_the_best_rule_is_paired():
    labels = torch.tensor([True, True, False, False])
    decided, best = torch.tensor([1, 1, 0, 1]).bool(), torch.tensor([1, 0, 0, 0]).bool()
    # gains 0, +1, 0, -1: mean 0, variance 2 / 3, standard error sqrt(2 / 3 / 4)
    excess, error = paired_excess(decided, best, labels)
    assert excess.item() == 0 and error.item() == pytest.approx(math.sqrt(1 / 6))


@pytest.mark.slow
def test_a_leaked_label_beats_bayes_by_far(truth):
    tokens, positive = truth.reviews(400, seed=4)
    best = truth.beliefs(tokens)[0][:, 10] > 0.5
    excess, error = paired_excess(positive, best, positive)
    assert excess > 4 * error


def test_labels_of_one_class_are_refused():
    with pytest.raises(ValueError, match="labels are all True"):
        fit_direction(torch.zeros(3, 2), torch.ones(3, dtype=torch.bool))


@pytest.mark.slow
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_no_layer_beats_bayes_and_the_last_is_near_it_where_the_verdict_is_due(name, truth):
    tokens, positive = truth.reviews(1800, seed=21)
    acts = capture_activations(load_model(name), tokens, LAYER_SITES)
    x = torch.stack(list(acts.values())).transpose(1, 2)
    fitted = fit_direction(x[:, :, :1200], positive[:1200], "lda")
    decided = project(x[:, :, 1200:], fitted.direction) > fitted.threshold[..., None]
    best = (truth.beliefs(tokens)[0][1200:] > 0.5).T
    excess, error = paired_excess(decided, best.expand_as(decided), positive[1200:])
    informed = slice(truth.grammar.slot("ADJ", 0), None)
    assert bool((excess[:, informed] <= 4 * error[:, informed]).all())
    at_i = truth.grammar.slot("VERB") - 1
    assert excess[-1, at_i] > -0.02 - 2 * error[-1, at_i]
    told = zip(truth.slot_names(tokens.shape[1]), truth.information.tolist(), strict=True)
    informs = [slot for slot, variance in told if variance > 1e-6]
    assert informs == ["ADJ 1", "CONN 2", "ADJ 2", "CONN 3", "ADJ 3", "VERB"]


@pytest.mark.slow
def test_a_run_stores_accuracy_beside_bayes_and_controls(finished, truth):
    record = finished.records("direction_sentiment")[0]
    assert record["sites"] == [
        "blocks.0.hook_resid_pre",
        "blocks.0.hook_resid_post",
        "blocks.1.hook_resid_post",
    ]
    names = ("accuracy", "auc", "accuracy_frozen", "accuracy_lda", "split_half_cosine")
    names += ("accuracy_shuffled", "accuracy_random", "accuracy_ablated", "accuracy_erased")
    assert record["sequences"] == {"fitted": 64, "held": 32}
    for name in names:
        assert len(record[name]) == 3 and len(record[name][0]) == 29
    assert len(record["bayes_accuracy"]) == 29
    # Before learning the policy is the reference: the axis has not turned.
    assert all(c == pytest.approx(1, abs=1e-3) for c in record["cosine_with_reference"][2][9:])
    assert record["accuracy_frozen"] == record["accuracy"]
    # Where the verdict is due the difference of means is no accident of the sample: halves agree.
    verdict = truth.grammar.slot("VERB") - 1
    assert record["split_half_cosine"][2][verdict] > 0.9
    erased = record["accuracy_erased"][2][verdict]
    assert record["accuracy_lda"][2][verdict] > max(0.8, erased)
    assert finished.tensors("direction_sentiment", 0)["direction"].shape == (3, 29, 64)


@pytest.mark.slow
def test_accuracy_of_a_record_matches_a_fit_by_numpy(make_trainer):
    """Difference of class means of two thirds, with the threshold half-way; see the last third."""
    trainer, (tokens, labels) = make_trainer(base_lr=3e-3), ReelTruth().reviews(60, seed=3)
    attach(trainer, Direction(every=2), eval_tokens=tokens, labels=labels)
    trainer.train()
    record, y = Run(trainer.run.path).records("direction_sentiment")[-1], labels.numpy()
    seen = capture_activations(trainer.policy, tokens, record["sites"])
    stored = {name: np.array(record[name], dtype=float) for name in ("accuracy", "auc")}
    for site, pos in ((0, 24), (1, 20), (2, 8), (2, 20), (2, 24)):
        x = seen[record["sites"][site]][:, pos].double().numpy()
        means = [x[:40][y[:40] == kind].mean(0) for kind in (True, False)]
        side = (x[40:] - sum(means) / 2) @ (means[0] - means[1])
        above = side[y[40:]][:, None] - side[~y[40:]]
        assert stored["accuracy"][site, pos] == pytest.approx(
            ((side > 0) == y[40:]).mean(), abs=0.03
        )
        assert stored["auc"][site, pos] == pytest.approx((above > 0).mean(), abs=0.03)


@pytest.mark.slow
def test_another_method_is_refused():
    with pytest.raises(ConfigError, match="'guess'"):
        Direction(method="guess")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("probe", "name"), [("direction_sentiment", "accuracy"), ("value_lens", "r2")]
)
def test_records_have_the_ends_and_pictures_the_best_of_how_many(finished, probe, name):
    record = finished.records(probe)[-1]
    names = (name, f"{name}_low", f"{name}_high")
    cells = [
        cell
        for rows in zip(*(record[n] for n in names), strict=True)
        for cell in zip(*rows, strict=True)
        if None not in cell
    ]
    inside = [low - 1e-4 <= x <= high + 1e-4 for x, low, high in cells]
    assert len(cells) > 50 and sum(inside) > 0.95 * len(cells)
    n = record["sequences"]["held"] if "sequences" in record else record["held_out"]
    assert max(high - low for _, low, high in cells) > 0.02 and n >= 30
    shown = probe_html(finished, probe)
    assert f"n = {n}" in shown
    assert f"Best of the {len(cells)} compared: {max(x for x, *_ in cells):.4g} [" in shown


@pytest.mark.slow
@pytest.mark.parametrize("probe", [Direction("plot", every=1), FrozenProbe(every=1)])
def test_labels_of_another_kind_raise_no_false_alarm(make_trainer, probe):
    """The noun of the first clause: a line reads it, and Bayes' rule for the sentiment does not."""
    tokens, sentiment = ReelTruth().reviews(192, seed=3)
    of_plot = tokens[:, ReelTruth().grammar.slot("ASP", 0)] == WORD_IDS["plot"]
    assert 0.05 < of_plot.float().mean() < 0.3
    assert ReelTruth().fits(tokens, sentiment) and not ReelTruth().fits(tokens, of_plot)
    trainer = make_trainer(total_phases=1, warmup_steps=0)
    attach(trainer, probe, eval_tokens=tokens, labels=of_plot)
    trainer.train()
    run = Run(trainer.run)
    assert [check.name for check in run.checks() if not check.ok] == []
    assert "bayes_accuracy" not in run.records(probe.name)[-1]
