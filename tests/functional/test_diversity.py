"""Distinct and repeated n-grams, overlap of texts, and log odds of words."""

import math

import pytest
from torch import tensor

from rlhf_lab import functional as F

TEXTS = tensor([[1, 2, 1, 2, 3], [1, 2, 4, 0, 0]])
MASK = tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()


def test_ngrams_match_hand_computed():
    assert F.distinct_n(TEXTS, 1, MASK) == pytest.approx(4 / 8)
    # 12 21 12 23 and 12 24: four of six differ, and none reaches from one text into the next
    assert F.distinct_n(TEXTS, 2, MASK) == pytest.approx(4 / 6)
    assert F.repeated_n(TEXTS, 1, MASK).tolist() == pytest.approx([2 / 5, 0])
    assert F.repeated_n(TEXTS, 2, MASK).tolist() == pytest.approx([1 / 4, 0])
    # {1, 2, 3} and {1, 2, 4} share two of three; {12, 21, 23} and {12, 24} share 12
    assert F.ngram_overlap(TEXTS, 1, MASK).tolist() == pytest.approx([2 / 3, 2 / 3])
    assert F.ngram_overlap(TEXTS, 2, MASK).tolist() == pytest.approx([1 / 3, 1 / 2])
    # a masked token is in no n-gram and joins none
    row, hole = tensor([[5, 6, 9, 5, 6]]), tensor([[1, 1, 0, 1, 1]]).bool()
    assert F.distinct_n(row, 2, hole) == pytest.approx(1 / 2)


def test_ngrams_of_short_and_single_texts_are_nan():
    row, hole = tensor([[5, 6, 9, 5, 6]]), tensor([[1, 1, 0, 1, 1]]).bool()
    assert math.isnan(F.distinct_n(row, 3, hole))
    assert F.repeated_n(row, 3, hole).isnan().all() and F.ngram_overlap(row, 1).isnan().all()
    one_empty = tensor([[1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
    assert F.ngram_overlap(TEXTS, 1, one_empty)[0] == 0
    for function in (F.distinct_n, F.repeated_n, F.ngram_overlap):
        with pytest.raises(ValueError, match="n must .*got 0"):
            function(TEXTS, 0, MASK)


def test_word_log_odds_match_hand_computed():
    # both together: 4, 4, 2, 0; a prior of 5 tokens is 2, 2, 1, 0
    found = F.word_log_odds(tensor([4, 1, 0, 0]), tensor([0, 3, 2, 0]), prior_tokens=5)
    # (6, 3, 1) of 10 and (2, 5, 3) of 10
    odds = [math.log(6 / 4 * 8 / 2), math.log(3 / 7), math.log(1 / 9 * 7 / 3), 0.0]
    sds = [math.sqrt(1 / 6 + 1 / 2), math.sqrt(1 / 3 + 1 / 5), math.sqrt(1 + 1 / 3), 0]
    assert found.log_odds.tolist() == pytest.approx(odds)
    assert found.sd.tolist() == pytest.approx(sds)
    z = [x / (sd or 1) for x, sd in zip(odds, sds, strict=True)]
    assert found.z.tolist() == pytest.approx(z)
    for counts in ([3, 0], [5, 0]), ([0, 0], [0, 0]):
        assert F.word_log_odds(*map(tensor, counts)).z.tolist() == [0, 0]
