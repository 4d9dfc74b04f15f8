"""Bootstrap over sequences: by hand, against plain loops, and how often it holds the truth."""

import math
import random
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from rlhf_lab.functional import (
    Interval,
    auc,
    bootstrap_interval,
    bootstrap_means,
    recovered_fraction,
)

number = st.floats(-10, 10, width=32)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_two_sequences_by_hand():
    """Means of two draws of 0 and 1: 0, 1/2, 1 with chances 1/4, 1/2, 1/4."""
    wide = bootstrap_interval(tensor([0.0, 1.0]), level=0.6)
    assert (wide.value, wide.low, wide.high, wide.n) == (0.5, 0.0, 1.0, 2)
    narrow = bootstrap_interval(tensor([0.0, 1.0]), level=0.4)
    assert (narrow.low, narrow.high) == (0.5, 0.5)
    assert str(wide) == "0.5 [0, 1], n = 2"


def test_the_interval_is_that_of_a_plain_loop():
    """Another program's draws: the ends agree as far as 20,000 resamples can tell."""
    rng = random.Random(1)
    values = [rng.expovariate(1.0) for _ in range(40)]
    means = sorted(statistics.fmean(rng.choices(values, k=40)) for _ in range(20_000))
    found = bootstrap_interval(tensor(values), level=0.9, resamples=20_000)
    assert found.value.item() == pytest.approx(statistics.fmean(values))
    assert found.low.item() == pytest.approx(means[1_000], abs=0.01)
    assert found.high.item() == pytest.approx(means[19_000], abs=0.01)
    # skewed to the right, as the values are: a symmetric interval would not be
    assert found.high - found.value > 1.05 * (found.value - found.low)


@given(
    st.lists(st.lists(number, min_size=1, max_size=4), min_size=2, max_size=6), st.integers(0, 9)
)
@settings(max_examples=40, deadline=None)
def test_ragged_rows_are_pooled_by_their_lengths(rows, seed):
    """The value is the mean over all tokens; every resample is one of whole rows."""
    padded = tensor([row + [math.nan] * (4 - len(row)) for row in rows])
    mask = tensor([[t < len(row) for t in range(4)] for row in rows])
    found = bootstrap_interval(padded, mask=mask, resamples=100, generator=generator(seed))
    assert found.value.item() == pytest.approx(
        math.fsum(x for row in rows for x in row) / sum(map(len, rows)), abs=1e-5
    )
    draws, pooled = generator(seed), []
    for _ in range(100):
        drawn = [rows[i] for i in torch.randint(len(rows), (len(rows),), generator=draws)]
        pooled.append(math.fsum(x for row in drawn for x in row) / sum(map(len, drawn)))
    low, high = statistics.quantiles(pooled, n=40, method="inclusive")[::38]
    assert found.low.item() == pytest.approx(low, abs=1e-5)
    assert found.high.item() == pytest.approx(high, abs=1e-5)


def test_tokens_of_one_sequence_do_not_count_as_many():
    """Eight tokens alike in each sequence: as wide as with one token, not narrower."""
    values = torch.randn(30, generator=generator())
    one, eight = (bootstrap_interval(values[:, None].expand(30, k)) for k in (1, 8))
    torch.testing.assert_close((one.low, one.high), (eight.low, eight.high))
    assert eight.n == 30
    flat = bootstrap_interval(values[:, None].expand(30, 8).flatten())
    assert flat.high - flat.low < 0.5 * (one.high - one.low)


def test_a_sequence_without_anything_is_left_out():
    values = tensor([[1.0, 9.0], [math.nan, math.inf], [3.0, 9.0]])
    mask = tensor([[True, False], [False, False], [True, False]])
    found = bootstrap_interval(values, mask=mask)
    assert (found.value, found.n, found.low, found.high) == (2.0, 2, 1.0, 3.0)


def test_one_sequence_has_no_interval():
    for found in (
        bootstrap_interval(tensor([3.0])),
        bootstrap_interval(tensor([[1.0, 5.0]])),
        bootstrap_interval(tensor([3.0, 4.0]), mask=tensor([True, False])),
    ):
        assert found.value == 3.0 and found.low is None and found.high is None and found.n == 1
        assert str(found) == "3 (no interval: one sequence), n = 1"


def test_a_ratio_and_any_callable_take_the_same_rows_of_each_column():
    """b = 2 a: the ratio is 2 in every resample, though neither mean is ever the same."""
    a = torch.rand(20, generator=generator()) + 0.1
    ratio = bootstrap_interval(a, 2 * a, statistic=lambda x, y: y.sum() / x.sum())
    assert (ratio.low.item(), ratio.value.item(), ratio.high.item()) == pytest.approx((2, 2, 2))
    with_mask = bootstrap_interval(
        a, mask=a > 0.5, statistic=lambda x, m: x[m].min(), generator=generator()
    )
    assert with_mask.n == int((a > 0.5).sum()) and with_mask.low > 0.5


def test_of_several_estimates_each_is_as_if_alone_and_the_best_says_among_how_many():
    values = torch.randn(25, 2, 3, generator=generator()) + torch.arange(6.0).view(2, 3)
    found = bootstrap_interval(values, statistic=lambda x: x.mean(0))
    assert found.value.shape == (2, 3)
    alone = bootstrap_interval(values[:, 1, 0])
    assert str(found[1, 0]) == str(alone)
    where, best = found.best()
    assert where == (1, 2) and best.compared == 6
    assert str(best) == f"{bootstrap_interval(values[:, 1, 2])}, the best of 6"
    assert str(found) == "(2, 3) estimates, n = 25"


def test_a_statistic_without_meaning_in_some_resamples_leaves_them_out_or_says_so():
    scores = torch.linspace(0, 1, 30)
    labels = scores > 0.4
    found = bootstrap_interval(scores, labels, statistic=auc)
    assert (found.low, found.value, found.high) == (1.0, 1.0, 1.0)
    # three positives of 30 are missing in one resample of 24, which is left out
    few = bootstrap_interval(scores, scores > 0.92, statistic=auc)
    assert (few.low, few.value, few.high) == (1.0, 1.0, 1.0)
    # one positive of 30 is missing in a third of the resamples
    rare = bootstrap_interval(scores, scores > 0.99, statistic=auc)
    assert rare.value == 1.0 and rare.low is None
    assert "defined in 6" in str(rare) and "of the resamples" in str(rare)


def test_functions_of_means_are_those_of_the_resampled_rows():
    """R2 of many predictions at once against a call per resample and prediction."""
    rng = generator(2)
    y = torch.randn(40, 3, generator=rng, dtype=torch.float64)
    y[:, 2] = 1.0
    predicted = y + torch.randn(40, 3, generator=rng, dtype=torch.float64) * 0.5

    def of_means(error, mean, square):
        variance = square - mean**2
        return torch.where(variance > 1e-9, 1 - error / variance, torch.nan)

    fast = bootstrap_means((y - predicted) ** 2, y, y**2, statistic=of_means, resamples=300)

    def of_rows(y, predicted):
        return 1 - ((y - predicted) ** 2).sum() / ((y - y.mean()) ** 2).sum()

    for i in range(2):
        slow = bootstrap_interval(y[:, i], predicted[:, i], statistic=of_rows, resamples=300)
        torch.testing.assert_close(
            (fast[i].value, fast[i].low, fast[i].high), (slow.value, slow.low, slow.high)
        )
    assert fast[2].low.isnan() and "no interval: the statistic is defined in 0%" in str(fast[2])
    assert fast.best()[0] == (int(fast.value[:2].argmax()),)
    means = bootstrap_means(y, resamples=300)
    one = bootstrap_interval(y[:, 1], resamples=300)
    torch.testing.assert_close((means[1].low, means[1].high), (one.low, one.high))
    assert str(bootstrap_means(tensor([[2.0]]))[0]) == "2 (no interval: one sequence), n = 1"


def test_draws_are_the_same_every_time_and_touch_no_global_state():
    values, before = torch.randn(20, generator=generator()), torch.get_rng_state()
    one, two = bootstrap_interval(values), bootstrap_interval(values)
    assert (one.low, one.high) == (two.low, two.high)
    other = bootstrap_interval(values, generator=generator(5))
    assert (other.low, other.high) != (one.low, one.high)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_other_kinds_of_numbers_are_taken_in_float64(dtype):
    values = tensor([0, 1, 1, 0, 1]).to(dtype)
    found = bootstrap_interval(values)
    assert found.value.dtype == torch.float64 and found.value.item() == pytest.approx(0.6)


def test_large_numbers_and_gradients():
    values = tensor([1e38, 3e38], requires_grad=True)
    found = bootstrap_interval(values)
    assert found.value.item() == pytest.approx(2e38, rel=1e-6)
    assert not found.value.requires_grad


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bootstrap_interval(torch.zeros(0)), "at least one sequence"),
        (
            lambda: bootstrap_interval(torch.zeros(2), mask=torch.zeros(2).bool()),
            "at least one sequence",
        ),
        (lambda: bootstrap_interval(torch.zeros(2), level=1.0), "level=1.0"),
        (lambda: bootstrap_interval(torch.zeros(2), level=0.0), "level=0.0"),
        (lambda: bootstrap_interval(torch.zeros(2), resamples=99), "resamples=99"),
        (lambda: bootstrap_interval(tensor([1.0, math.nan])), "has nan where the mask"),
        (lambda: bootstrap_interval(torch.zeros(2), torch.zeros(2)), "a statistic of 2 columns"),
        (
            lambda: bootstrap_interval(torch.zeros(2), torch.zeros(3), statistic=lambda a, b: a),
            "one row per sequence",
        ),
        (lambda: bootstrap_interval(torch.zeros(2, 3), mask=torch.ones(2).bool()), "mask"),
        (lambda: bootstrap_interval(tensor(1.0)), "one row per sequence"),
        (lambda: bootstrap_means(torch.zeros(0)), "at least one sequence"),
        (lambda: bootstrap_means(torch.zeros(2), level=2.0), "level=2.0"),
        (lambda: bootstrap_means(torch.zeros(2), torch.zeros(3)), "one row per sequence"),
    ],
)
def test_what_has_no_meaning_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["means", "ragged", "r2"])
def test_the_interval_holds_the_truth_as_often_as_it_says(kind):
    """90 % intervals of 60 sequences, 300 times: 270 +- 5 by chance, less a few as n is finite.

    Over tokens, ragged sequences with a share in common would be held far less often.
    """
    rng, held = generator(3), 0
    for _ in range(300):
        if kind == "means":
            found, truth = (
                bootstrap_interval(
                    torch.rand(60, generator=rng), level=0.9, resamples=200, generator=rng
                ),
                0.5,
            )
        elif kind == "ragged":
            lengths = torch.randint(1, 9, (60,), generator=rng)
            mask = torch.arange(8) < lengths[:, None]
            own = torch.randn(60, 1, generator=rng) + 0.5 * torch.randn(60, 8, generator=rng)
            found, truth = (
                bootstrap_interval(own, mask=mask, level=0.9, resamples=200, generator=rng),
                0.0,
            )
        else:
            x = torch.randn(60, generator=rng)
            y = x + torch.randn(60, generator=rng)
            square = lambda a, b: torch.corrcoef(torch.stack([a, b]))[0, 1] ** 2
            found, truth = (
                bootstrap_interval(x, y, statistic=square, level=0.9, resamples=200, generator=rng),
                0.5,
            )
        held += bool(found.low <= truth <= found.high)
    assert 246 <= held <= 288


def test_recovered_fraction_by_hand():
    # (2 - 1) / (5 - 1), whole or not at all would be 1 or 0
    clean, corrupted = tensor([4.0, 6.0]), tensor([0.5, 1.5])
    found = recovered_fraction(clean, corrupted, tensor([1.5, 2.5]))
    assert found.value.item() == pytest.approx(0.25) and found.n == 2
    # of the first alone 1 / 3.5, of the second alone 1 / 4.5
    assert found.high.item() == pytest.approx(1 / 3.5)
    assert found.low.item() == pytest.approx(1 / 4.5)
    assert recovered_fraction(clean, corrupted, clean).value == 1
    assert recovered_fraction(clean, corrupted, corrupted).value == 0
    beyond = recovered_fraction(clean, corrupted, 2 * clean - corrupted)
    assert beyond.value.item() == pytest.approx(2.0)


def test_it_is_a_ratio_of_means_and_no_mean_of_ratios():
    """One sequence on which corruption changes nothing would make a mean of ratios infinite."""
    clean, corrupted = tensor([4.0, 2.0, 6.0] * 4), tensor([0.0, 2.0, 0.0] * 4)
    found = recovered_fraction(clean, corrupted, tensor([2.0, 2.0, 3.0] * 4))
    assert found.value.item() == pytest.approx(0.5)
    assert 0 < found.low <= 0.5 <= found.high


def test_where_there_is_nothing_to_recover_it_is_undefined_and_says_so():
    noise = torch.randn(50, generator=generator())
    found = recovered_fraction(noise, noise.flip(0), torch.zeros(50))
    assert found.value is None and found.low is None and found.n == 50
    assert str(found).startswith("undefined (clean and corrupted differ by ")
    assert "no more than noise" in str(found) and str(found).endswith("n = 50")
    other = recovered_fraction(noise, torch.randn(50, generator=generator(1)), torch.ones(50))
    assert other.value is None and "no more than noise" in str(other)
    same = recovered_fraction(noise, noise, torch.ones(50))
    assert same.value is None
    with pytest.raises(ValueError, match="no estimate to choose"):
        found.best()


def test_one_sequence_recovers_a_share_without_an_interval():
    found = recovered_fraction(tensor([3.0]), tensor([1.0]), tensor([2.0]))
    assert found.value.item() == 0.5 and found.low is None and found.n == 1
    assert recovered_fraction(tensor([3.0]), tensor([3.0]), tensor([2.0])).value is None


@given(st.lists(st.tuples(number, number), min_size=3, max_size=6), number, st.floats(0.1, 5))
@settings(max_examples=30, deadline=None)
def test_shift_and_scale_of_the_metric_change_nothing(rows, shift, scale):
    corrupted, patched = (tensor([row[i] for row in rows], dtype=torch.float64) for i in (0, 1))
    clean = corrupted + torch.arange(1.0, len(rows) + 1)
    one, other = (
        recovered_fraction(*(f(x) for x in (clean, corrupted, patched)), resamples=100)
        for f in (lambda x: x, lambda x: scale * x + shift)
    )
    for name in ("value", "low", "high"):
        assert getattr(one, name).item() == pytest.approx(getattr(other, name).item(), abs=1e-6)


@pytest.mark.slow
def test_a_fractions_interval_holds_the_truth_as_often_as_it_says():
    """Sequences differ in what there is to recover; 30 % of it comes back, with noise."""
    rng, held = generator(1), 0
    for _ in range(300):
        corrupted = torch.randn(60, generator=rng)
        effect = 1 + torch.rand(60, generator=rng)
        patched = corrupted + 0.3 * effect + 0.5 * torch.randn(60, generator=rng)
        found = recovered_fraction(
            corrupted + effect, corrupted, patched, level=0.9, resamples=200, generator=rng
        )
        held += bool(found.low <= 0.3 <= found.high)
    assert 246 <= held <= 288


def test_a_missing_value_is_told():
    assert str(Interval(None, None, None, 4, why="none")) == "undefined (none), n = 4"
