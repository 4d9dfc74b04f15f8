"""The split of heads' outputs: hand-computed numbers, Shapley's definition, and grouped heads."""

import itertools

import pytest
import torch
from torch import Tensor

from rlhf_lab.diffing.attention import HeadCache, attention_split, pattern_distance

BATCH, KEYS, HEADS, D_HEAD, D_MODEL = 3, 5, 4, 4, 6


def test_split_matches_hand_computed_for_two_keys():
    """A from (1, 0) to (0, 1), values (0, 6) in both, W_O from 1 to 2: y from 0 to 12.

    v00 = v10 = (0, 6), v01 = v11 = (0, 12); vbar = (0, 6/3 + 12/3 + 12/6 + 6/6) = (0, 9), and its
    mean under Abar = (1/2, 1/2) is 4.5. qk = (-1)(0 - 4.5), (+1)(9 - 4.5): 4.5 of each key.
    wo of the second key: 6 (0/3 + 1/6) + 6 (1/3 + 0/6) = 3.
    """
    number = lambda *x: torch.tensor(x, dtype=torch.float64)
    values = number(0, 6)[None, :, None, None]
    caches = [HeadCache(number(*pattern)[None, None], values) for pattern in ((1, 0), (0, 1))]
    one = number(1)[None, None]
    found = attention_split(*caches, one, 2 * one, number(1)[None])
    assert found.qk[0, 0].tolist() == pytest.approx([4.5, 4.5])
    assert found.ov[0, 0].tolist() == [0, 0]
    assert found.wo[0, 0].tolist() == pytest.approx([0, 3])


@pytest.mark.parametrize("each", [1, 2, HEADS])
def test_split_matches_mean_marginals_over_all_orders(each):
    generator = torch.Generator().manual_seed(0)
    noise = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    reader = noise(BATCH, D_MODEL)
    ends = [
        (
            noise(BATCH, HEADS, KEYS).softmax(-1),
            noise(BATCH, KEYS, HEADS // each, D_HEAD),
            noise(HEADS, D_HEAD, D_MODEL),
        )
        for _ in range(2)
    ]

    def output(pattern: Tensor, value: Tensor, W_O: Tensor) -> Tensor:
        rows = [
            torch.einsum("bk,bkd,dm,bm->b", pattern[:, h], value[:, :, h // each], W_O[h], reader)
            for h in range(HEADS)
        ]
        return torch.stack(rows, 1)

    expected = torch.zeros(3, BATCH, HEADS, dtype=torch.float64)
    for order in itertools.permutations(range(3)):
        now = list(ends[0])
        for factor in order:
            before = output(*now)
            now[factor] = ends[1][factor]
            expected[factor] += (output(*now) - before) / 6
    caches = [HeadCache(*end[:2]) for end in ends]
    found = attention_split(*caches, ends[0][2], ends[1][2], reader)
    for part, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(part.sum(-1), wanted)


def test_pattern_distance_is_total_variation_by_key():
    one, other = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.0, 0.5, 0.5]])
    assert pattern_distance(one, other).tolist() == [[0.25, 0.0, 0.25]]
