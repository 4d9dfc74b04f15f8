from pathlib import Path

import pytest
import torch

from rlhf_lab.functional import bootstrap_interval
from rlhf_lab.probes import Run
from rlhf_lab.probes.probe import RESAMPLES
from rlhf_lab.views.intervals import final_bands, sample_bands

REWARDS = [0.0, 1.0, 1.0, 0.5, 0.0, 1.0]


class Given(Run):
    """A run of these samples and metrics, which are in no directory."""

    info = {}
    path = Path("nowhere")

    def __init__(self, samples, metrics, info):
        self._samples, self._metrics, self.info = samples, metrics, info

    def metrics(self):
        return self._metrics

    def samples(self, phase=None):
        return [sample for sample in self._samples if phase in (None, sample["phase"])]


def run_of(samples, metrics, info=None):
    return Given(samples, metrics, info or {})


def samples_of(phase, rewards=REWARDS, **others):
    return [{"phase": phase, "reward": reward, **others} for reward in rewards]


def test_a_band_is_the_interval_of_the_phases_samples():
    samples = [*samples_of(0), *samples_of(1, REWARDS[::-1], true_reward=0.5), *samples_of(2)]
    found, n = sample_bands(run_of(samples, [{"phase": 0}, {"phase": 1}]))
    one = bootstrap_interval(torch.tensor(REWARDS), resamples=RESAMPLES)
    assert n == 6 and found["mean_reward"].keys() == {0, 1}
    ends = one.low.item(), one.high.item()
    assert found["mean_reward"][0] == pytest.approx(ends)
    assert found["true_reward"] == {1: pytest.approx((0.5, 0.5))}
    assert "kl_per_sequence" not in found


def test_a_share_is_so_many_ones():
    metrics = [{"phase": 0, "grammatical_fraction": 4 / 6}]
    found, _ = sample_bands(run_of(samples_of(0), metrics))
    ones = torch.tensor([1.0] * 4 + [0.0] * 2)
    one = bootstrap_interval(ones, resamples=RESAMPLES)
    low, high = found["grammatical_fraction"][0]
    assert (low, high) == pytest.approx((one.low.item(), one.high.item()))


def test_one_sample_has_no_band_and_phases_of_several_sizes_no_number():
    samples = [*samples_of(0, [0.3]), *samples_of(1)]
    found, n = sample_bands(run_of(samples, [{"phase": 0}, {"phase": 1}]))
    assert found["mean_reward"][0] == (None, None) and n is None


def test_the_interval_of_final_figures_is_narrowed_and_moved():
    info = {"phases_done": 2, "final": {"mean_reward": 0.7, "samples": 24}}
    found = final_bands(run_of(samples_of(2), [], info))
    one = bootstrap_interval(torch.tensor(REWARDS), resamples=RESAMPLES)
    low, high = found["mean_reward"]
    assert (high - low) * 2 == pytest.approx((one.high - one.low).item(), rel=1e-5)
    assert low - 0.7 == pytest.approx((one.low - one.value).item() / 2, abs=1e-6)
    assert final_bands(run_of(samples_of(2), [], {"phases_done": 2})) == {}
