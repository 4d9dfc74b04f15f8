"""Means over tokens, over sequences, and over a constant; and that cuts do not matter."""

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from rlhf_lab.functional import aggregate, aggregation_denominator

NAN, INF = float("nan"), float("inf")
WAYS = ("token_mean", "sequence_mean", "constant")
X = tensor([[6.0, 2.0, NAN], [3.0, INF, 0.0], [NAN, NAN, NAN]])
MASK = tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]]).bool()


def by_loop(rows, aggregation, gen):
    """The three means over lists of real entries, one list per sequence."""
    if aggregation == "token_mean":
        return math.fsum(sum(rows, [])) / max(len(sum(rows, [])), 1)
    if aggregation == "sequence_mean":
        real = [row for row in rows if row]
        return math.fsum(math.fsum(row) / len(row) for row in real) / max(len(real), 1)
    return math.fsum(sum(rows, [])) / (len(rows) * gen)


def test_the_three_means_by_hand():
    # (6 + 2 + 3 + 0) / 4; (4 + 1.5) / 2, the empty row left out; 11 / (3 * 3)
    assert aggregate(X, MASK).item() == 2.75
    assert aggregate(X, MASK, "sequence_mean").item() == 2.75
    assert aggregate(X, MASK, "constant").item() == pytest.approx(11 / 9)
    one_long = tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()
    # (6 + 2 + 3) / 3 against (4 + 3) / 2
    assert aggregate(X, one_long).item() == pytest.approx(11 / 3)
    assert aggregate(X, one_long, "sequence_mean").item() == 3.5
    assert aggregate(tensor([[1.0, 3.0]])).item() == 2.0


def test_denominators_by_hand():
    assert [aggregation_denominator(MASK, way).item() for way in WAYS] == [4, 2, 9]
    assert aggregation_denominator(MASK, "constant", max_len=10).item() == 30
    assert aggregate(X, MASK, "sequence_mean", denominator=11).item() == 0.5


def test_gradients_show_which_tokens_count_how_much():
    mask = tensor([[1, 1, 1, 1], [1, 0, 0, 0]]).bool()
    expected = {"token_mean": (1 / 5, 1 / 5), "sequence_mean": (1 / 8, 1 / 2)}
    expected["constant"] = (1 / 8, 1 / 8)
    for way, (long, short) in expected.items():
        x = torch.zeros(2, 4, requires_grad=True)
        aggregate(x, mask, way).backward()
        assert x.grad[0].tolist() == pytest.approx([long] * 4)
        assert x.grad[1].tolist() == pytest.approx([short, 0, 0, 0])


@given(st.integers(0, 10_000), st.sampled_from(WAYS), st.lists(st.integers(0, 6), max_size=3))
@settings(max_examples=60, deadline=None)
def test_however_the_batch_is_cut_the_parts_add_up(seed, way, cuts):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 4, generator=generator) < 0.5
    rows = [x[i][mask[i]].tolist() for i in range(6)]
    assert aggregate(x, mask, way).item() == pytest.approx(by_loop(rows, way, 4), rel=1e-9)
    edges = [0, *sorted(cuts), 6]
    parts = [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]
    counted = sum(aggregation_denominator(mask[part], way) for part in parts)
    assert counted == aggregation_denominator(mask, way)
    total = sum(aggregate(x[part], mask[part], way, counted) for part in parts)
    assert total.item() == pytest.approx(by_loop(rows, way, 4), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_real_gives_zero_with_zero_gradient(way):
    x = torch.full((2, 3), NAN, requires_grad=True)
    result = aggregate(x, torch.zeros(2, 3).bool(), way)
    result.backward()
    assert result.item() == 0.0 and (x.grad == 0).all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(way, dtype):
    # 200 * 1000 = 2e5 is beyond float16
    result = aggregate(torch.full((1, 200), 1000.0, dtype=dtype), None, way)
    assert result.dtype == torch.float32 and result.item() == 1000.0


@pytest.mark.parametrize("way", WAYS)
def test_gradients_agree_with_finite_differences(way):
    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: aggregate(v, MASK, way), x)


@pytest.mark.usefixtures("no_type_checks")
def test_what_makes_no_sense_is_refused():
    unchecked = inspect.unwrap(aggregate)
    with pytest.raises(ValueError, match="Unknown aggregation 'mean'. Choose one of: token_mean"):
        unchecked(X, MASK, "mean", 3)
    with pytest.raises(ValueError, match="Unknown aggregation 'mean'"):
        inspect.unwrap(aggregation_denominator)(MASK, "mean")
    with pytest.raises(ValueError, match="max_len must .*got 0"):
        aggregation_denominator(MASK, "constant", 0)
    with pytest.raises(ValueError, match="mask has shape"):
        unchecked(X, MASK[:2])
    with pytest.raises(ValueError, match="denominator must .*got -1"):
        aggregate(X, MASK, denominator=-1)
