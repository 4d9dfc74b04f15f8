"""V of the policy: exact by enumeration on a tiny model, and its correlation with estimates."""

import itertools

import numpy as np
import pytest
import torch

from rlhf_lab.course.exercises.toys import toy_transformer
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.probes.policy_value import (
    PolicyValues,
    correlation_with,
    policy_values,
    reliability,
)
from rlhf_lab.samples import Samples
from rlhf_lab.sampling_spec import SamplingSpec

STOP, GEN_LEN = 4, 3
PREFIXES = [[1, 7, 5, 9], [1, 6], [1, 8, 8, 10, 3]]


@pytest.fixture(scope="module")
def tiny() -> TransformerWithValueHead:
    """A random transformer of 11 words."""
    return TransformerWithValueHead(toy_transformer()).eval()


def pays(tokens: list[int]) -> float:
    """Some number of a whole text, which depends on its order and on where it stops."""
    return sum((place + 1) * (token % 5) for place, token in enumerate(tokens)) / 30


def reward(samples: Samples) -> torch.Tensor:
    rows = zip(samples.tokens.tolist(), samples.written_mask.tolist(), strict=True)
    return torch.tensor([pays(list(itertools.compress(*row))) for row in rows])


def exact_value(
    policy: TransformerWithValueHead, prefix: list[int], temperature: float, left: int
) -> float:
    """The expected reward over every continuation of the prefix, by recursion, in float64."""
    if left == 0:
        return pays(prefix)
    with torch.no_grad():
        logits = policy.base_model(torch.tensor([prefix]))[0, -1].double() / temperature
    chances = logits.softmax(-1).tolist()
    return sum(
        chance * (pays([*prefix, token]) if token == STOP else value)
        for token, chance in enumerate(chances)
        if chance > 1e-9
        for value in [
            0.0 if token == STOP else exact_value(policy, [*prefix, token], temperature, left - 1)
        ]
    )


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.slow
def test_the_estimate_is_the_exact_value_within_its_error(tiny):
    """All 10^3 continuations of three tokens, and those that stop, beside 4,000 samples of each."""
    spec = SamplingSpec(GEN_LEN, temperature=0.7, stop_tokens=(STOP,))
    found = policy_values(tiny, PREFIXES, spec, reward, 4000, seeded())
    exact = torch.tensor([exact_value(tiny, prefix, 0.7, GEN_LEN) for prefix in PREFIXES])
    away = (found.mean - exact) / found.standard_error
    assert away.abs().max() < 3.5
    assert found.standard_error.max() < 0.1 * exact.std()


@pytest.mark.slow
def test_errors_are_those_of_repeated_estimates(tiny):
    """The spread of 200 estimates of one prefix is their stated error."""
    spec = SamplingSpec(GEN_LEN)
    found = policy_values(tiny, [PREFIXES[0]] * 200, spec, reward, 16, seeded())
    stated = found.standard_error.square().mean().sqrt()
    assert found.mean.std() == pytest.approx(stated.item(), rel=0.15)


def test_one_continuation_is_refused(tiny):
    with pytest.raises(ConfigError, match="continuations=1"):
        policy_values(tiny, PREFIXES, SamplingSpec(1), reward, 1, seeded())


def test_correlations_are_numpy_s_where_the_mask_is_true():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 40, 3, generator=generator, dtype=torch.float64)
    y = y + 0.8 * x
    mask = torch.rand(40, 3, generator=generator) < 0.7
    mask[:, 2] = True
    x[:, 2] = 5.0
    found = correlation_with(x, 100 - 7 * y.where(mask, torch.nan), mask)
    for column in range(2):
        kept = mask[:, column]
        expected = -np.corrcoef(x[kept, column], y[kept, column])[0, 1]
        assert found.value[column].item() == pytest.approx(expected, abs=1e-12)
        assert found.low[column] < expected < found.high[column]
    assert found.value[2].isnan() and found.low[2].isnan()


def test_the_share_that_is_no_noise_by_hand():
    """Means 1, 2, 3 have the variance 1; errors of .5 have .25 of it."""
    even = PolicyValues(torch.tensor([1.0, 2.0, 3.0]), torch.full((3,), 0.5))
    assert reliability(even) == pytest.approx(0.75)
    assert reliability(PolicyValues(even.mean, torch.full((3,), 2.0))) == 0.0
    assert reliability(PolicyValues(torch.ones(1), torch.zeros(1))) == 0.0
