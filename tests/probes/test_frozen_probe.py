"""The frozen probe: the cosine and its interval, halves of alternating labels, records of runs."""

import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.probes import FrozenProbe, ReelTruth, Suite, attach
from rlhf_lab.probes.direction import cosine_interval, fit_direction
from rlhf_lab.probes.frozen_probe import halves_of
from tests.probes.looking import train_soundly


def test_cosine_is_that_of_differences_of_means():
    x, first = torch.randn(2, 3, 40, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.rand(40, generator=torch.Generator().manual_seed(1)) < 0.4
    found = cosine_interval(x, first, labels)
    axes = [fit_direction(acts, labels).direction for acts in (x, first)]
    assert found.value.tolist() == pytest.approx((axes[0] * axes[1]).sum(-1).tolist())
    assert found.n == 40 and bool((found.low < found.high).all())
    x[1] = 1.0  # a token that is always the same has no direction
    assert cosine_interval(x, first, labels).low.isnan().tolist() == [False, True, False]
    assert cosine_interval(first, first, labels).low.tolist() == pytest.approx([1.0] * 3)


def test_halves_have_both_classes_when_labels_alternate():
    labels = torch.arange(7) % 2 == 0
    halves = halves_of((labels, ~labels))
    assert [half.nonzero()[:, 0].tolist() for half in halves] == [[0, 1, 4, 5], [2, 3, 6]]


@pytest.mark.slow
def test_before_learning_both_probes_are_equal(make_trainer):
    tokens, labels = ReelTruth().reviews(96, seed=5)
    trainer = make_trainer(gen_len=26, base_lr=3e-3)
    pos = ReelTruth().grammar.slot("VERB") - 1
    attach(trainer, Suite(FrozenProbe(pos, every=1), eval_tokens=tokens, labels=labels))
    run = train_soundly(trainer)
    first, *_, last = run.records("frozen_probe")
    assert first["gap"] == [0.0] * 3 and first["cosine"][1:] == [1.0, 1.0]
    assert first["shift"] == [0.0] * 3 and abs(last["shift"][2]) > 0.01
    assert first["slot"] == "I" and first["accuracy_frozen"][2] <= first["bayes_accuracy"][0] + 0.1
    assert len(run.checks()) == 3


def test_a_reset_reference_raises(make_trainer):
    tokens, labels = ReelTruth().reviews(4, seed=1)
    trainer = make_trainer(reset_reference_every=1, total_phases=3)
    with pytest.raises(ConfigError, match="Leave it None"):
        attach(trainer, FrozenProbe(), eval_tokens=tokens, labels=labels)
