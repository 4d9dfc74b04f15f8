"""Controllers of the KL coefficient."""

import pytest

from rlhf_lab.training import AdaptiveKLController, FixedKLController


def test_fixed_coefficient_stays():
    controller = FixedKLController(0.3)
    assert [controller.update(kl, 64) for kl in (0.0, 6.0, 1e9)] == [0.3, 0.3, 0.3]


def test_adaptive_coefficient_matches_hand_computed():
    """KL 6.6 of target 6: error 0.1; 256 sequences of 10,000: 0.2 * (1 + 0.1 * 0.0256) = 0.200512.

    KL 60 and 0: the error is limited to 0.2 and -0.2. On target, nothing changes.
    """
    controller = AdaptiveKLController(0.2, target=6.0, horizon=10_000)
    assert controller.update(6.6, 256) == pytest.approx(0.200512, abs=1e-12)
    assert controller.update(60.0, 256) == pytest.approx(0.20153862144, abs=1e-12)
    assert controller.update(0.0, 256) == pytest.approx(0.20153862144 * 0.99488, abs=1e-12)
    before = controller.kl_coef
    assert controller.update(6.0, 256) == before
    for kl in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"must be finite, got {kl}"):
            controller.update(kl, 256)
    assert controller.kl_coef == before


@pytest.mark.slow
def test_unit_is_nats_per_sequence(make_trainer):
    """With nats per token, a sixth of it, the coefficient would only fall."""
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
def test_custom_controller_sets_the_coefficient(make_trainer):
    """Its update may return None; test_own_optimizer.py resumes one."""

    class Doubling:
        kl_coef, seen = 0.5, ()

        def update(self, kl_per_sequence: float, n_sequences: int) -> None:
            self.seen = [*self.seen, (kl_per_sequence, n_sequences)]
            self.kl_coef = 2 * self.kl_coef

    controller = Doubling()
    reports = make_trainer({"kl_controller": controller}, total_phases=3).train()
    assert [report.kl_coef for report in reports] == [0.5, 1.0, 2.0]
    assert controller.seen == [(report.kl_per_sequence, 8) for report in reports]
