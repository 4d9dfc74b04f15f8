"""Bootstrap intervals over sequences, and the fraction that a patch recovers."""

import math

import pytest
import torch
from torch import tensor

from rlhf_lab import functional as F
from rlhf_lab.functional import Interval, bootstrap_interval, bootstrap_means, recovered_fraction

NAN = math.nan


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def ends(interval):
    return interval.low, interval.value, interval.high


def test_bootstrap_matches_hand_computed():
    """Means of two draws of 0 and 1: 0, 1/2, 1 with probabilities 1/4, 1/2, 1/4."""
    wide = bootstrap_interval(tensor([0.0, 1.0]), level=0.6)
    assert (*ends(wide), wide.n) == (0.0, 0.5, 1.0, 2) and str(wide) == "0.5 [0, 1], n = 2"
    assert ends(bootstrap_interval(tensor([0.0, 1.0]), level=0.4)) == (0.5, 0.5, 0.5)
    # a sequence without a real entry is left out
    values = tensor([[1.0, 9.0], [NAN, math.inf], [3.0, 9.0]])
    mask = tensor([[1, 0], [0, 0], [1, 0]]).bool()
    for statistic in (None, lambda x, m: x[m].mean()):
        found = bootstrap_interval(values, mask=mask, statistic=statistic)
        assert (*ends(found), found.n) == (1.0, 2.0, 3.0, 2)
    large = bootstrap_interval(tensor([1e38, 3e38], requires_grad=True))
    assert large.value.item() == pytest.approx(2e38) and not large.value.requires_grad


def test_bootstrap_counts_sequences_not_tokens():
    values = torch.randn(30, generator=generator())
    one, eight = (bootstrap_interval(values[:, None].expand(30, k)) for k in (1, 8))
    torch.testing.assert_close(ends(one), ends(eight))
    assert eight.n == 30
    flat = bootstrap_interval(values[:, None].expand(30, 8).flatten())
    assert flat.high - flat.low < 0.5 * (one.high - one.low)


def test_bootstrap_of_one_sequence_has_no_interval():
    for found in (
        bootstrap_interval(tensor([3.0])),
        bootstrap_interval(tensor([[1.0, 5.0]])),
        bootstrap_interval(tensor([3.0, 4.0]), mask=tensor([True, False])),
        bootstrap_means(tensor([3.0])),
    ):
        assert (*ends(found), found.n) == (None, 3.0, None, 1)
        assert str(found) == "3 (no interval: one sequence), n = 1"


def test_bootstrap_draws_the_same_rows_of_each_column():
    """b = 2 a: the ratio is 2 in every resample, though the means differ."""
    a = torch.rand(20, generator=generator()) + 0.1
    ratio = bootstrap_interval(a, 2 * a, statistic=lambda x, y: y.sum() / x.sum())
    assert [x.item() for x in ends(ratio)] == pytest.approx([2, 2, 2])
    lowest = bootstrap_interval(a, mask=a > 0.5, statistic=lambda x, m: x[m].min())
    assert lowest.n == int((a > 0.5).sum()) and lowest.low > 0.5


def test_bootstrap_of_several_estimates_matches_each_alone():
    values = torch.randn(25, 2, 3, generator=generator()) + torch.arange(6.0).view(2, 3)
    found = bootstrap_interval(values, statistic=lambda x: x.mean(0))
    assert str(found) == "(2, 3) estimates, n = 25"
    assert str(found[1, 0]) == str(bootstrap_interval(values[:, 1, 0]))
    where, best = found.best()
    assert where == (1, 2) and best.compared == best.best()[1].compared == 6
    assert str(best) == f"{bootstrap_interval(values[:, 1, 2])}, the best of 6"
    undefined = Interval(None, None, None, 4, why="none")
    assert str(undefined) == "undefined (none), n = 4"
    with pytest.raises(ValueError, match="no estimate to choose"):
        undefined.best()


@pytest.mark.slow
def test_bootstrap_leaves_out_or_reports_undefined_resamples():
    scores = torch.linspace(0, 1, 30)
    # three positives of 30 are missing in one resample of 24, one in a third of them
    assert ends(bootstrap_interval(scores, scores > 0.92, statistic=F.auc)) == (1.0, 1.0, 1.0)
    rare = bootstrap_interval(scores, scores > 0.99, statistic=F.auc)
    assert rare.value == 1.0 and rare.low is None
    assert "defined in 6" in str(rare) and "of the resamples" in str(rare)


def test_bootstrap_means_match_resampled_rows():
    """R2 of many predictions at once, and one call per prediction."""
    y, noise = torch.randn(2, 40, 3, generator=generator(2), dtype=torch.float64)
    y[:, 2] = 1.0
    predicted = y + 0.5 * noise

    def of_means(error, mean, square):
        variance = square - mean**2
        return torch.where(variance > 1e-9, 1 - error / variance, NAN)

    def of_rows(y, predicted):
        return 1 - ((y - predicted) ** 2).sum() / ((y - y.mean()) ** 2).sum()

    fast = bootstrap_means((y - predicted) ** 2, y, y**2, statistic=of_means, resamples=300)
    for i in range(2):
        slow = bootstrap_interval(y[:, i], predicted[:, i], statistic=of_rows, resamples=300)
        torch.testing.assert_close(ends(fast[i]), ends(slow))
    assert fast[2].low.isnan() and "no interval: the statistic is defined in 0%" in str(fast[2])
    assert fast.best()[0] == (int(fast.value[:2].argmax()),)


def test_bootstrap_draws_the_same_without_a_generator():
    values, state = torch.randn(20, generator=generator()), torch.get_rng_state()
    one, two = bootstrap_interval(values), bootstrap_interval(values)
    assert ends(one) == ends(two) != ends(bootstrap_interval(values, generator=generator(5)))
    assert torch.equal(torch.get_rng_state(), state)


X = torch.zeros(2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bootstrap_interval(X[:0]), "at least one sequence"),
        (lambda: bootstrap_interval(X, mask=X.bool()), "at least one sequence"),
        (lambda: bootstrap_interval(X, level=1.0), "level=1.0"),
        (lambda: bootstrap_interval(X, resamples=99), "resamples=99"),
        (lambda: bootstrap_interval(tensor([1.0, NAN])), "has nan where the mask"),
        (lambda: bootstrap_interval(X, X), "a statistic of 2 columns"),
        (lambda: bootstrap_interval(X, X[:1], statistic=F.auc), "one row per sequence"),
        (lambda: bootstrap_interval(X[:, None], mask=~X.bool()), "mask"),
        (lambda: bootstrap_means(X[:0]), "at least one sequence"),
        (lambda: bootstrap_means(X, level=2.0), "level=2.0"),
        (lambda: bootstrap_means(X, X[:1]), "one row per sequence"),
    ],
)
def test_bootstrap_raises_on_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_recovered_fraction_matches_hand_computed():
    # (2 - 1) / (5 - 1); of the first sequence alone 1 / 3.5, of the second 1 / 4.5
    clean, corrupted = tensor([4.0, 6.0]), tensor([0.5, 1.5])
    found = recovered_fraction(clean, corrupted, tensor([1.5, 2.5]))
    assert [x.item() for x in ends(found)] == pytest.approx([1 / 4.5, 0.25, 1 / 3.5])
    assert found.n == 2
    narrow = recovered_fraction(clean, corrupted, tensor([1.5, 2.5]), level=0.4)
    assert [x.item() for x in ends(narrow)] == pytest.approx([0.25] * 3)  # draws of both
    values = [recovered_fraction(clean, corrupted, x).value.item() for x in (clean, corrupted)]
    assert values == [1, 0]
    # a ratio of means: a mean of ratios would be infinite
    clean, corrupted = tensor([4.0, 2.0, 6.0] * 4), tensor([0.0, 2.0, 0.0] * 4)
    found = recovered_fraction(clean, corrupted, tensor([2.0, 2.0, 3.0] * 4))
    assert found.value.item() == pytest.approx(0.5) and 0 < found.low <= 0.5 <= found.high
    one = recovered_fraction(tensor([3.0]), tensor([1.0]), tensor([2.0]))
    assert (*ends(one), one.n) == (None, 0.5, None, 1)


def test_recovered_fraction_of_no_effect_is_undefined():
    noise = torch.randn(50, generator=generator())
    other = torch.randn(50, generator=generator(1))
    for clean, corrupted in ((noise, other), (noise, noise), (noise[:1], noise[:1])):
        found = recovered_fraction(clean, corrupted, torch.ones_like(clean))
        assert ends(found) == (None, None, None) and found.n == len(clean)
        assert str(found).startswith("undefined (clean and corrupted differ by ")
        assert "no more than noise" in str(found) and str(found).endswith(f"n = {found.n}")
