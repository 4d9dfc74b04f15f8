"""Distinct and repeated n-grams, overlap of texts, log odds of words, and promoted mass."""

import math

import pytest
import torch
from torch import tensor

from rlhf_lab.functional import (
    distinct_n,
    ngram_overlap,
    promoted_mass,
    repeated_n,
    word_log_odds,
)

TEXTS = tensor([[1, 2, 1, 2, 3], [1, 2, 4, 0, 0]])
MASK = tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()


def test_n_grams_by_hand():
    assert distinct_n(TEXTS, 1, MASK) == pytest.approx(4 / 8)
    # 12 21 12 23 and 12 24: four of six differ, and none reaches from one text into the next
    assert distinct_n(TEXTS, 2, MASK) == pytest.approx(4 / 6)
    assert repeated_n(TEXTS, 1, MASK).tolist() == pytest.approx([2 / 5, 0])
    assert repeated_n(TEXTS, 2, MASK).tolist() == pytest.approx([1 / 4, 0])
    # {1, 2, 3} and {1, 2, 4} share two of three; {12, 21, 23} and {12, 24} share 12
    assert ngram_overlap(TEXTS, 1, MASK).tolist() == pytest.approx([2 / 3, 2 / 3])
    assert ngram_overlap(TEXTS, 2, MASK).tolist() == pytest.approx([1 / 3, 1 / 2])


def test_one_word_again_and_again_is_one_of_all_tokens():
    constant = torch.full((4, 6), 7)
    assert distinct_n(constant, 1) == pytest.approx(1 / 24)
    assert repeated_n(constant, 2).tolist() == pytest.approx([4 / 5] * 4)
    assert ngram_overlap(constant, 3).tolist() == [1.0] * 4


def test_masked_tokens_are_in_no_n_gram_nor_between_two():
    hole = tensor([[1, 1, 0, 1, 1]]).bool()
    row = tensor([[5, 6, 9, 5, 6]])
    assert distinct_n(row, 2, hole) == pytest.approx(1 / 2)
    assert distinct_n(row, 1, hole) == pytest.approx(2 / 4)
    assert math.isnan(distinct_n(row, 3, hole))
    assert repeated_n(row, 3, hole).isnan().all() and ngram_overlap(row, 1).isnan().all()
    nothing = torch.zeros_like(TEXTS, dtype=torch.bool)
    assert math.isnan(distinct_n(TEXTS, 1, nothing)) and repeated_n(TEXTS, 1, nothing).isnan().all()
    one_silent = tensor([[1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
    assert ngram_overlap(TEXTS, 1, one_silent)[0] == 0


def test_overlap_is_the_mean_of_all_pairs():
    tokens = torch.randint(9, (7, 12), generator=torch.Generator().manual_seed(0))
    for n in (1, 2):
        sets = [{tuple(row[i : i + n].tolist()) for i in range(13 - n)} for row in tokens]
        shares = [[len(a & b) / len(a) for b in sets] for a in sets]
        expected = [(sum(row) - 1) / 6 for row in shares]
        assert ngram_overlap(tokens, n).tolist() == pytest.approx(expected)


def test_log_odds_by_hand():
    # both together: 4, 4, 2, 0; a prior of 5 tokens is 2, 2, 1, 0
    found = word_log_odds(tensor([4, 1, 0, 0]), tensor([0, 3, 2, 0]), prior_tokens=5)
    # (6, 3, 1) of 10 against (2, 5, 3) of 10
    odds = [math.log(6 / 4 * 8 / 2), math.log(3 / 7), math.log(1 / 9 * 7 / 3), 0.0]
    assert found.log_odds.tolist() == pytest.approx(odds)
    sds = [math.sqrt(1 / 6 + 1 / 2), math.sqrt(1 / 3 + 1 / 5), math.sqrt(1 + 1 / 3), 0]
    assert found.sd.tolist() == pytest.approx(sds)
    assert found.z.tolist() == pytest.approx(
        [x / (sd or 1) for x, sd in zip(odds, sds, strict=True)]
    )


def test_log_odds_turn_round_and_shrink_with_the_prior():
    y, other = tensor([30, 5, 65]), tensor([20, 1, 79])
    there, back = word_log_odds(y, other), word_log_odds(other, y)
    torch.testing.assert_close(there.log_odds, -back.log_odds)
    torch.testing.assert_close(there.z, -back.z)
    sizes = [word_log_odds(y, other, a).log_odds.abs().max().item() for a in (1e-9, 10, 1e6)]
    plain = math.log(5 / 95) - math.log(1 / 99)
    assert sizes[0] == pytest.approx(plain, rel=1e-6) and sizes[0] > sizes[1] > sizes[2]
    for given in ([3, 0], [5, 0]), ([0, 0], [0, 0]):
        assert word_log_odds(*map(tensor, given)).log_odds.tolist() == [0, 0]
        assert word_log_odds(*map(tensor, given)).z.tolist() == [0, 0]


def test_z_is_normal_where_both_sets_are_drawn_alike():
    generator = torch.Generator().manual_seed(0)
    chances = torch.tensor([0.4, 0.3, 0.2, 0.1])
    drawn = [
        torch.multinomial(chances.expand(800, 4), 300, True, generator=generator) for _ in "ab"
    ]
    counts = [torch.stack([(rows == v).sum(1) for v in range(4)], 1) for rows in drawn]
    z = torch.stack([word_log_odds(*pair, 1.0).z for pair in zip(*counts, strict=True)])
    # the log odds of one of few words vary more than 1/y says, by 1/(n - y): less so for the rarest
    assert z[:, 3].std().item() == pytest.approx(1 / math.sqrt(0.9), abs=0.08)
    assert z.mean(0).abs().max() < 0.12


def test_promoted_mass_by_hand():
    log = lambda *rows: torch.tensor(rows).log()[None]
    now, before = log([0.5, 0.5], [0.9, 0.1]), log([0.25, 0.75], [0.5, 0.5])
    torch.testing.assert_close(promoted_mass(now, before), tensor([0.325, -0.325]))
    one = tensor([[True, False]])
    now[0, 1] = float("nan")
    torch.testing.assert_close(promoted_mass(now, before, one), tensor([0.25, -0.25]))
    assert promoted_mass(now, before, ~one & one).tolist() == [0, 0]


def test_promoted_mass_sums_to_zero_and_does_not_depend_on_where_logits_begin():
    generator = torch.Generator().manual_seed(1)
    now, before = (5 * torch.randn(3, 4, 50, generator=generator) for _ in "ab")
    found = promoted_mass(now, before)
    assert abs(found.sum().item()) < 1e-6 and found.abs().max() > 0.01
    torch.testing.assert_close(promoted_mass(now + 7, before - 3), found, atol=1e-6, rtol=0)
    torch.testing.assert_close(promoted_mass(before, now), -found)
    assert promoted_mass(now, now).tolist() == [0.0] * 50
    extreme = promoted_mass(1e4 * now, before)
    assert extreme.isfinite().all() and abs(extreme.sum().item()) < 1e-6
    half = promoted_mass(now.bfloat16(), before.bfloat16())
    assert half.dtype == torch.float32


def test_promoted_mass_has_the_gradient_of_finite_differences():
    generator = torch.Generator().manual_seed(2)
    now, before = (torch.randn(2, 3, 4, generator=generator).double() for _ in "ab")
    mask = tensor([[1, 1, 0], [1, 0, 0]]).bool()
    ask = lambda x, y: promoted_mass(x, y, mask)
    assert torch.autograd.gradcheck(ask, (now.requires_grad_(), before.requires_grad_()))


@pytest.mark.usefixtures("no_type_checks")
def test_what_cannot_be_counted_is_refused():
    for function in (distinct_n, repeated_n, ngram_overlap):
        with pytest.raises(ValueError, match="n must .*got 0"):
            function(TEXTS, 0, MASK)
        with pytest.raises(ValueError, match="mask has shape"):
            function(TEXTS, 1, MASK[:, :3])
    with pytest.raises(ValueError, match="counts has|other_counts has"):
        word_log_odds(tensor([1, 2]), tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="prior_tokens must .*got 0"):
        word_log_odds(tensor([1]), tensor([1]), 0)
    with pytest.raises(ValueError, match="the same shape"):
        promoted_mass(torch.zeros(1, 2, 3), torch.zeros(1, 2, 4))
