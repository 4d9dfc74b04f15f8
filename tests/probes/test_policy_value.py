"""Value of a prefix, compared with enumeration on a tiny model; correlations with numpy's."""

import numpy as np
import pytest
import torch

from rlhf_lab.course.exercises.toys import toy_transformer
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead
from rlhf_lab.probes.policy_value import correlation_with, policy_values
from rlhf_lab.samples import Samples
from rlhf_lab.sampling_spec import SamplingSpec

STOP, GEN_LEN = 4, 3
PREFIXES = [[1, 7, 5, 9], [1, 6], [1, 8, 8, 10, 3]]


@pytest.fixture(scope="module")
def tiny() -> TransformerWithValueHead:
    """A random transformer of 11 words."""
    return TransformerWithValueHead(toy_transformer()).eval()


def score(tokens: list[int]) -> float:
    """A number of a whole text that depends on its order and on where it stops."""
    return sum((i + 1) * (token % 5) for i, token in enumerate(tokens)) / 30


def reward(samples: Samples) -> torch.Tensor:
    rows = zip(samples.tokens, samples.written_mask, strict=True)
    return torch.tensor([score(row[real].tolist()) for row, real in rows])


@torch.no_grad()
def exact_value(policy: TransformerWithValueHead, prefix: list[int], left: int) -> float:
    """The expected score over every continuation at temperature 0.7, by recursion."""
    if left == 0 or (left < GEN_LEN and prefix[-1] == STOP):
        return score(prefix)
    probs = (policy.base_model(torch.tensor([prefix]))[0, -1].double() / 0.7).softmax(-1).tolist()
    known = [(token, p) for token, p in enumerate(probs) if p > 1e-9]
    return sum(p * exact_value(policy, [*prefix, token], left - 1) for token, p in known)


@pytest.mark.slow
def test_policy_values_match_enumeration_within_their_errors(tiny):
    spec = SamplingSpec(GEN_LEN, temperature=0.7, stop_tokens=(STOP,))
    found = policy_values(tiny, PREFIXES, spec, reward, 4000, torch.Generator().manual_seed(0))
    exact = torch.tensor([exact_value(tiny, prefix, GEN_LEN) for prefix in PREFIXES])
    assert ((found.mean - exact) / found.standard_error).abs().max() < 3.5
    assert found.standard_error.max() < 0.1 * exact.std()


@pytest.mark.slow
def test_errors_are_the_spread_of_repeated_estimates(tiny):
    seeded, spec = torch.Generator().manual_seed(0), SamplingSpec(GEN_LEN)
    found = policy_values(tiny, [PREFIXES[0]] * 200, spec, reward, 16, seeded)
    expected = found.standard_error.square().mean().sqrt().item()
    assert found.mean.std() == pytest.approx(expected, rel=0.15)
    with pytest.raises(ConfigError, match="continuations=1"):
        policy_values(tiny, PREFIXES, spec, reward, 1, seeded)


def test_correlations_match_numpy_where_the_mask_is_true():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 40, 3, generator=generator, dtype=torch.float64)
    y = y + 0.8 * x
    mask = torch.rand(40, 3, generator=generator) < 0.7
    x[:, 2] = 5.0
    found = correlation_with(x, 100 - 7 * y.where(mask, torch.nan), mask)
    for column in range(2):
        kept = mask[:, column]
        expected = -np.corrcoef(x[kept, column], y[kept, column])[0, 1]
        assert found.value[column].item() == pytest.approx(expected, abs=1e-12)
        assert found.low[column] < expected < found.high[column]
    assert found.value[2].isnan() and found.low[2].isnan()
