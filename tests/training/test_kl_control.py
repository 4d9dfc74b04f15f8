"""The controllers of the KL penalty's weight."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.training import AdaptiveKLController, FixedKLController, RLHFTrainer


def test_a_fixed_coefficient_stays():
    controller = FixedKLController(0.3)
    assert [controller.update(kl, 64) for kl in (0.0, 6.0, 1e9)] == [0.3, 0.3, 0.3]


def test_adaptive_by_hand():
    # KL 6.6 of target 6: error 0.1; 256 sequences of 10,000: 0.2 * (1 + 0.1 * 0.0256) = 0.200512
    controller = AdaptiveKLController(0.2, target=6.0, horizon=10_000)
    assert controller.update(6.6, 256) == pytest.approx(0.200512, abs=1e-12)
    # KL 60: error clipped to 0.2: 0.200512 * (1 + 0.2 * 0.0256) = 0.201538621...
    assert controller.update(60.0, 256) == pytest.approx(0.20153862144, abs=1e-12)
    # KL 0: error clipped to -0.2: 0.20153862144 * (1 - 0.2 * 0.0256)
    assert controller.update(0.0, 256) == pytest.approx(0.20153862144 * 0.99488, abs=1e-12)


@pytest.mark.parametrize("kl", [float("nan"), float("inf")])
def test_a_kl_that_is_no_number_leaves_the_coefficient_alone(kl):
    controller = AdaptiveKLController(0.2, 6.0, 10_000)
    with pytest.raises(ValueError, match=f"must be finite, got {kl}"):
        controller.update(kl, 256)
    assert controller.kl_coef == 0.2


def test_on_target_nothing_changes():
    assert AdaptiveKLController(0.2, 6.0, 10_000).update(6.0, 256) == 0.2


@given(st.floats(0, 1e6), st.integers(1, 10_000))
def test_the_coefficient_stays_positive_and_moves_towards_the_target(kl, n):
    changed = AdaptiveKLController(0.2, 6.0, 10_000).update(kl, n)
    assert 0 < changed
    assert (changed - 0.2) * (kl - 6.0) >= 0
    assert abs(changed / 0.2 - 1) <= 0.2 + 1e-12


@pytest.mark.slow
def test_the_unit_is_nats_per_sequence(make_trainer):
    """Fed nats per token, the controller would see a twentieth of it and only ever decay."""
    trainer = make_trainer(
        kl_controller="adaptive", kl_target=0.001, kl_horizon=100, total_phases=4, base_lr=1e-3
    )
    reports = trainer.train()
    expected = AdaptiveKLController(trainer.args.kl_coef, 0.001, 100)
    for report in reports:
        assert report.kl_coef == expected.kl_coef
        expected.update(report.kl_per_sequence, trainer.args.batch_size)
    assert reports[1].kl_coef < reports[0].kl_coef
    assert reports[-1].kl_per_sequence > 0.001
    assert reports[-1].kl_coef > reports[1].kl_coef


@pytest.mark.slow
def test_a_controller_of_the_callers_own_drives_the_run_and_is_asked_for_again(make_trainer):
    class Doubling:
        kl_coef, seen = 0.5, ()

        def update(self, kl_per_sequence: float, n_sequences: int) -> float:
            self.seen = (*self.seen, (kl_per_sequence, n_sequences))
            self.kl_coef = 2 * self.kl_coef
            return self.kl_coef

    own = Doubling()
    trainer = make_trainer({"kl_controller": own}, total_phases=3)
    reports = trainer.train()
    assert [report.kl_coef for report in reports] == [0.5, 1.0, 2.0]
    assert own.seen == tuple((r.kl_per_sequence, trainer.args.batch_size) for r in reports)
    with pytest.raises(RunError, match="custom components: kl_controller"):
        RLHFTrainer.resume(trainer.run.path)
    assert (
        RLHFTrainer.resume(trainer.run.path, kl_controller=Doubling()).kl_controller.kl_coef == 4.0
    )


def test_a_horizon_shorter_than_a_batch_is_refused(reel_args):
    with pytest.raises(ConfigError, match="kl_horizon=4"):
        reel_args(kl_controller="adaptive", batch_size=8, kl_horizon=4)
