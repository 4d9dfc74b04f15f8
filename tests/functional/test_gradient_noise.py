"""Cosine, kept share and noise scale of gradients, by hand, by loop and against known noise."""

import math

import pytest
import torch
from torch import tensor

from rlhf_lab.functional import gradient_cosine, kept_share, noise_scale


def test_cosine_by_hand():
    # batches of 2: means (1, 0), (1, 1), (0, -2); the seventh row fills no batch
    rows = tensor(
        [[2.0, 0], [0, 0], [1, 3], [1, -1], [3, -2], [-3, -2], [9, 9]], requires_grad=True
    )
    found = gradient_cosine(rows, tensor([1.0, 0.0]), 2)
    torch.testing.assert_close(found, tensor([1.0, math.sqrt(0.5), 0.0]))
    found.sum().backward()
    assert rows.grad[6].tolist() == [0.0, 0.0] and rows.grad[2, 1] != 0


@pytest.mark.parametrize("n", [1, 3, 4, 10])
def test_cosine_equals_a_loop(n):
    generator = torch.Generator().manual_seed(n)
    rows = torch.randn(10, 5, generator=generator, dtype=torch.float64)
    reference = torch.randn(5, generator=generator, dtype=torch.float64)
    expected = []
    for start in range(0, 10 - n + 1, n):
        mean = sum(rows[start + i] for i in range(n)) / n
        expected.append(float(mean @ reference) / float(mean.norm() * reference.norm()))
    found = gradient_cosine(rows, reference, n)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


def test_cosine_does_not_depend_on_lengths_and_takes_half_precision():
    rows, reference = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.ones(4)
    found = gradient_cosine(rows, reference, 3)
    torch.testing.assert_close(gradient_cosine(100 * rows, 7 * reference, 3), found)
    half = gradient_cosine(rows.half(), reference.half(), 3)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, found, atol=1e-3, rtol=0)
    assert gradient_cosine(torch.zeros(2, 4), reference, 1).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("n", [0, 7])
def test_a_batch_larger_than_what_is_there_is_refused(n):
    with pytest.raises(ValueError, match=f"n must be between 1 and 6 .*got {n}"):
        gradient_cosine(torch.ones(6, 2), torch.ones(2), n)


def test_kept_share_by_hand():
    # (3, 1) along (2, 0): 6 of 4; (1, 9): 2 of 4
    found = kept_share(tensor([[3.0, 1.0], [1.0, 9.0], [0.0, 5.0]]), tensor([2.0, 0.0]))
    assert found.tolist() == [1.5, 0.5, 0.0]


def test_noise_scale_by_hand():
    # even rows have mean (2, 0), odd ones (1, 1): product 2; variances 5/3 and 1/3 add up to 2
    rows = tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 0.0], [2.0, 1.0]])
    assert noise_scale(rows).item() == pytest.approx((5 / 3 + 1 / 3) / 2)
    assert noise_scale(rows, 8).item() == pytest.approx(8.0)


def test_noise_scale_finds_the_noise_that_was_put_in_whatever_the_size_of_a_block():
    generator = torch.Generator().manual_seed(1)
    signal = torch.randn(40, generator=generator)
    signal /= signal.norm()
    rows = signal + torch.randn(20_000, 40, generator=generator)  # tr Cov = 40, |E g|^2 = 1
    for n in (1, 4):
        blocks = rows.unflatten(0, (-1, n)).mean(1)
        assert noise_scale(blocks, n).item() == pytest.approx(40, rel=0.05)
    # and the cosine of a batch follows from it
    for n in (20, 100):
        cosine = gradient_cosine(rows, signal, n).mean().item()
        assert cosine == pytest.approx(1 / math.sqrt(1 + 40 / n), abs=0.01)


def test_noise_scale_refuses_too_few_rows():
    with pytest.raises(ValueError, match="at least 4 rows .*got 3 rows"):
        noise_scale(torch.ones(3, 2))
    with pytest.raises(ValueError, match="n=0"):
        noise_scale(torch.ones(4, 2), 0)
