"""The split of what heads write: numbers by hand, an integral, constants, and grouped heads."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from rlhf_lab.diffing.attention import HeadCache, attention_split, pattern_distance

BATCH, KEYS, HEADS, D_HEAD, D_MODEL = 3, 5, 2, 4, 6


def drawn(seed: int, value_heads: int = HEADS) -> tuple[HeadCache, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    noise = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    pattern = noise(BATCH, HEADS, KEYS).softmax(-1)
    cache = HeadCache(pattern, noise(BATCH, KEYS, value_heads, D_HEAD))
    return cache, noise(HEADS, D_HEAD, D_MODEL)


@pytest.fixture
def reader() -> Tensor:
    return torch.randn(BATCH, D_MODEL, generator=torch.Generator().manual_seed(9)).double()


def written(cache: HeadCache, W_O: Tensor, reader: Tensor) -> Tensor:
    """What each head writes, head by head and key by key, with loops."""
    out = torch.zeros(BATCH, HEADS, dtype=torch.float64)
    group = HEADS // cache.value.shape[2]
    for b, h, k in itertools.product(range(BATCH), range(HEADS), range(KEYS)):
        wrote = cache.value[b, k, h // group] @ W_O[h]
        out[b, h] += cache.pattern[b, h, k] * (wrote @ reader[b])
    return out


def test_two_keys_by_hand():
    """A from (1, 0) to (0, 1), values (0, 6) in both, W_O from 1 to 2: y from 0 to 12.

    v00 = v10 = (0, 6), v01 = v11 = (0, 12); vbar = (0, 6/3 + 12/3 + 12/6 + 6/6) = (0, 9), and its
    mean under Abar = (1/2, 1/2) is 4.5. qk = (-1)(0 - 4.5), (+1)(9 - 4.5): 4.5 of each key.
    wo of the second key: 6 (0/3 + 1/6) + 6 (1/3 + 0/6) = 3.
    """
    number = lambda *x: torch.tensor(x, dtype=torch.float64)
    values = number(0, 6)[None, :, None, None]
    caches = (
        HeadCache(number(1, 0)[None, None], values),
        HeadCache(number(0, 1)[None, None], values),
    )
    one = number(1)[None, None]
    found = attention_split(*caches, one, 2 * one, number(1)[None])
    assert found.qk[0, 0].tolist() == pytest.approx([4.5, 4.5])
    assert found.ov[0, 0].tolist() == [0, 0]
    assert found.wo[0, 0].tolist() == pytest.approx([0, 3])
    assert sum(found).sum().item() == pytest.approx(12)


@pytest.mark.parametrize("value_heads", [HEADS, 1])
def test_causes_are_mean_marginals_over_all_orders(reader, value_heads):
    """Shapley's definition: the mean over six orders in which the factors are exchanged."""
    ends = [
        (cache.pattern, cache.value, W_O)
        for cache, W_O in (drawn(0, value_heads), drawn(1, value_heads))
    ]
    y = lambda mixed: written(HeadCache(*mixed[:2]), mixed[2], reader)
    expected = [torch.zeros(BATCH, HEADS, dtype=torch.float64) for _ in range(3)]
    for order in itertools.permutations(range(3)):
        now = list(ends[0])
        for factor in order:
            before = y(now)
            now[factor] = ends[1][factor]
            expected[factor] += (y(now) - before) / math.factorial(3)
    caches = [HeadCache(*end[:2]) for end in ends]
    found = attention_split(*caches, ends[0][2], ends[1][2], reader)
    for part, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(part.sum(-1), wanted)


def test_a_constant_in_all_values_has_no_part_in_the_pattern(reader):
    """It is what b_V is; without the mean taken off, it would move between keys."""
    (cache0, W_O), (cache1, _) = drawn(0), drawn(1)
    plain = attention_split(cache0, cache1, W_O, W_O, reader)
    moved = [HeadCache(cache.pattern, cache.value + 7) for cache in (cache0, cache1)]
    shifted = attention_split(*moved, W_O, W_O, reader)
    torch.testing.assert_close(shifted.qk, plain.qk)
    torch.testing.assert_close(shifted.ov, plain.ov)


def test_the_distance_of_patterns_is_total_variation():
    one, other = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.0, 0.5, 0.5]])
    assert pattern_distance(one, other).tolist() == [[0.25, 0.0, 0.25]]
    apart = pattern_distance(torch.eye(3)[:1], torch.eye(3)[1:2])
    assert apart.sum().item() == 1
