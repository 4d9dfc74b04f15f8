"""Diversity of a batch: n-grams that no other response has, counted by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_lab.errors import ConfigError
from rlhf_lab.rewards import Diversity, TextBatch, score_batch


def shares(n, *responses):
    return score_batch(Diversity(n), TextBatch(list(responses))).rewards.tolist()


def test_bigrams_by_hand():
    """ab, bc, cd | ab, bx | (no bigram): bc and cd of three are alone, bx of two."""
    assert shares(2, "a b c d", "a b x", "a") == pytest.approx([2 / 3, 1 / 2, 0.0])


def test_a_ngram_that_comes_twice_in_one_response_is_its_own_and_counts_once():
    """a, b | b: a of {a, b} is alone."""
    assert shares(1, "a a a b", "b") == [0.5, 0.0]
    assert shares(2, "a b a b a b", "c d") == [1.0, 1.0]


def test_equal_responses_earn_nothing_and_one_alone_everything():
    assert shares(2, "x y z", "x y z") == [0.0, 0.0]
    assert shares(3, "x y z") == [1.0]
    assert shares(4, "x y z") == [0.0]
    assert shares(2) == []


def test_prompts_do_not_count():
    written = TextBatch(["the film a b", "the film c d"], ["the film", "the film"])
    assert score_batch(Diversity(1), written).rewards.tolist() == [1.0, 1.0]


@pytest.mark.usefixtures("no_type_checks")
def test_the_length_has_to_be_a_whole_number():
    for n in (0, -1, 1.5, True, "2"):
        with pytest.raises(ConfigError, match="whole number"):
            Diversity(n)


@given(st.lists(st.text("ab ", max_size=8), max_size=6), st.integers(1, 3))
def test_it_is_the_share_that_a_search_through_all_others_leaves(responses, n):
    def grams(text):
        words = text.split()
        return {" ".join(words[i : i + n]) for i in range(len(words)) if i + n <= len(words)}

    expected = []
    for i, response in enumerate(responses):
        others = set().union(*(grams(r) for j, r in enumerate(responses) if j != i))
        own = grams(response)
        expected.append(len(own - others) / len(own) if own else 0.0)
    assert shares(n, *responses) == pytest.approx(expected)
