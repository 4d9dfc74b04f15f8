import pytest
import torch

from rlhf_lab.functional import bootstrap_interval
from rlhf_lab.probes.probe import RESAMPLES
from rlhf_lab.views.intervals import final_metrics, mean_with_ends, sample_ends
from rlhf_lab.views.report import _curves
from tests.views.page_blocks import MemoryRun

GENERATOR = torch.Generator().manual_seed(0)
REWARDS = [0.0, 1.0, 1.0, 0.5, 0.0, 1.0]


def test_ends_of_rows_are_those_of_each_alone():
    rows = torch.rand(3, 12, generator=GENERATOR)
    mean, low, high = mean_with_ends(rows)
    for i, row in enumerate(rows):
        one = bootstrap_interval(row, resamples=RESAMPLES)
        assert (low[i], high[i]) == pytest.approx((one.low.item(), one.high.item()))
        assert (mean[i], low[i], high[i]) == pytest.approx(mean_with_ends(row))
    assert mean_with_ends(rows[:, :1])[1:] == ([None] * 3, [None] * 3)


def make_samples(phase, rewards=REWARDS, **others):
    return [{"phase": phase, "reward": reward, **others} for reward in rewards]


def test_a_band_is_the_interval_of_the_phases_samples():
    samples = [*make_samples(0), *make_samples(1, REWARDS[::-1], true_reward=0.5), *make_samples(2)]
    found, n = sample_ends(MemoryRun(samples, [{"phase": 0}, {"phase": 1}]))
    one = bootstrap_interval(torch.tensor(REWARDS), resamples=RESAMPLES)
    reward = {"mean_reward_low": one.low.item(), "mean_reward_high": one.high.item()}
    true = {"true_reward_low": 0.5, "true_reward_high": 0.5}
    assert n == 6 and found[0] == pytest.approx(reward) and found.keys() == {0, 1}
    assert found[1].keys() == reward.keys() | true.keys()
    assert {name: found[1][name] for name in true} == pytest.approx(true)


def test_fractions_have_intervals_over_the_samples():
    metrics = [{"phase": 0, "grammatical_fraction": 4 / 6, "faithful_fraction": 1.0}]
    ones = torch.tensor([1.0] * 4 + [0.0] * 2)
    rows = zip(make_samples(0), ones.tolist(), [1.0, None] * 3, strict=True)
    samples = [x | {"grammatical": each, "faithful": known} for x, each, known in rows]
    found, _ = sample_ends(MemoryRun(samples, metrics))
    assert "faithful_fraction_low" not in found[0]  # not known of all samples
    one = bootstrap_interval(ones, resamples=RESAMPLES)
    ends = found[0]["grammatical_fraction_low"], found[0]["grammatical_fraction_high"]
    assert ends == pytest.approx((one.low.item(), one.high.item()))


def test_rewards_with_dots_in_their_names_have_curves_with_bands():
    metrics = [{"phase": phase, "reward/a.b": 0.5} for phase in (0, 1)] + [{"phase": 2}]
    samples = [x for phase in (0, 1) for x in make_samples(phase, **{"reward/a.b": 0.5})]
    run = MemoryRun(samples, metrics)
    found = "".join(curve.fragment for curve in _curves({"run": run})["curves"])
    assert "before they are weighted: reward/a.b over phase" in found  # and none of their ends
    assert found.count("<polyline") == found.count('<polygon class="band') == 1


def test_one_sample_has_no_band_and_several_sizes_no_number():
    samples = [*make_samples(0, [0.3]), *make_samples(1)]
    found, n = sample_ends(MemoryRun(samples, [{"phase": 0}, {"phase": 1}]))
    assert set(found[0].values()) == {None} and n is None


def test_the_interval_of_final_figures_is_narrowed_and_moved():
    info = {"phases_done": 2, "final": {"mean_reward": 0.7, "samples": 24}}
    found = final_metrics(MemoryRun(make_samples(2), [], info))
    one = bootstrap_interval(torch.tensor(REWARDS), resamples=RESAMPLES)
    low, high = (0.7 + (x - one.value).item() / 2 for x in (one.low, one.high))
    assert found == {"mean_reward": f"0.7 [{low:.3g}, {high:.3g}]", "samples": 24}
    equal = final_metrics(MemoryRun(make_samples(2, [1.0] * 6), [], info))
    assert equal == info["final"]  # 0.7 [0.7, 0.7] would be too sure
    assert final_metrics(MemoryRun(make_samples(2), [], {"phases_done": 2})) == {}
