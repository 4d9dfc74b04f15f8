"""KL by position: estimators by a loop, intervals by column, and a run's distributions."""

import math

import pytest
import torch

from rlhf_lab.functional import bootstrap_interval
from rlhf_lab.probes.kl_by_position import estimates_by_position, interval_by_position
from rlhf_lab.probes.probe import RESAMPLES


def test_estimators_match_a_loop():
    logprobs = torch.log(torch.tensor([[0.5, 0.2], [0.4, 0.1], [0.3, 0.9]]))
    ref_logprobs = torch.log(torch.tensor([[0.25, 0.2], [0.8, 0.3], [0.3, 0.1]]))
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    found = estimates_by_position(logprobs, ref_logprobs, mask)
    for t, rows in ((0, (0, 1, 2)), (1, (0, 1))):
        d = [(logprobs[r, t] - ref_logprobs[r, t]).item() for r in rows]
        for k, column in enumerate((d, [x * x / 2 for x in d], [math.exp(-x) - 1 + x for x in d])):
            mean = sum(column) / len(column)
            assert found[f"k{k + 1}_mean"][t] == pytest.approx(mean, abs=1e-6)


def test_intervals_are_those_of_each_position_alone():
    generator = torch.Generator().manual_seed(0)
    x, mask = torch.rand(20, 3, generator=generator), torch.ones(20, 3, dtype=torch.bool)
    mask[:, 2] = False
    found = interval_by_position(x, mask)
    one = bootstrap_interval(x[:, 1], resamples=RESAMPLES)
    assert found.n == 20 and str(found[1]) == str(one)
    assert found.value[2].isnan() and found.low[2].isnan()
    mask[5:, 0] = False  # where few have a token, fewer resamples do
    assert interval_by_position(x, mask).value[0].item() == pytest.approx(x[:5, 0].mean().item())
    alone = interval_by_position(x[:1], mask[:1])
    assert alone.low is None and alone.value[0] == x[0, 0]
