"""The Reel grammar: its layout, the statistics of its sampler, and its reviews."""

import numpy as np
import pytest

from rlhf_lab.organism import VOCABULARY, Grammar, decode

REVIEW = (
    "this movie honestly , the plot was so good and the music wasn't quite awful "
    "but the ending was really dull . i loved it . thanks"
)
N = 40_000


@pytest.fixture(scope="module")
def sample():
    return Grammar().sample(N, np.random.default_rng(7))


def words_at(sample, name):
    columns = list(Grammar().positions(name))
    return np.array(VOCABULARY)[sample.tokens[:, columns]]


def assert_fraction(hits, expected):
    """Compare a fraction with its probability, within 4.5 standard errors sqrt(p (1 - p) / n)."""
    hits = np.asarray(hits).ravel()
    error = np.sqrt(expected * (1 - expected) / len(hits))
    assert abs(hits.mean() - expected) < 4.5 * error


@pytest.mark.usefixtures("no_type_checks")
def test_slots_match_hand_counted():
    grammar = Grammar()
    expected = {
        "OPEN": (3,),
        "ASP": (6, 12, 18),
        "COP": (7, 13, 19),
        "ADV": (8, 14, 20),
        "ADJ": (9, 15, 21),
        "CONN": (10, 16),
        "VERB": (24,),
        "TAG": (27,),
        "EOS": (28,),
    }
    assert {name: grammar.positions(name) for name in expected} == expected
    assert grammar.slot("VERB") == 24
    assert grammar.slot("ADJ", clause=1) == 15
    assert grammar.slot("CONN", clause=2) == 16
    for name, clause in (("NOUN", None), ("ADJ", None), ("CONN", 0)):
        with pytest.raises(ValueError, match=f"is {name!r}|clause is {clause}"):
            grammar.slot(name, clause)
    for invalid in (lambda: Grammar(0), lambda: Grammar(1.5), lambda: decode([72])):
        with pytest.raises(ValueError, match="n_clauses is (0|1.5)|outside 0..71"):
            invalid()
    assert decode([0, 2, 8, 1]) == "this movie"


def test_latents_have_the_stated_probabilities(sample):
    latents = sample.latents
    assert_fraction(latents.sentiment == 1, 0.5)
    for k in range(3):
        assert_fraction(latents.intensity == k, 1 / 3)
        assert_fraction(latents.style == k, 1 / 3)
        assert_fraction(latents.negation[:, k], 0.2)
        assert_fraction(latents.polarity[:, k] == latents.sentiment, 0.85)
        for aspect in range(8):
            assert_fraction(latents.aspect[:, k] == aspect, 1 / 8)
    assert_fraction(latents.verdict == latents.sentiment, 0.9)


def test_words_have_the_stated_probabilities(sample):
    assert_fraction(words_at(sample, "HEAD") == "film", 0.5)
    for word in ("honestly", "folks", "arguably"):
        assert_fraction(words_at(sample, "OPEN") == word, 1 / 9)
    tags = {"cheers": 0.3, "thanks": 0.3, "bye": 0.2, "peace": 0.18, "popcorn": 0.02}
    for word, p in tags.items():
        assert_fraction(words_at(sample, "TAG") == word, p)
    latents = sample.latents
    adverbs = words_at(sample, "ADV")[latents.style == 2]
    assert_fraction(adverbs == "rather", 0.35)
    assert_fraction(adverbs == "so", 0.075)
    is_strong = latents.intensity == 2
    for words, p in (("superb terrible", 0.8 / 4), ("lovely messy", 0.1 / 4)):
        assert_fraction(np.isin(words_at(sample, "ADJ")[is_strong], words.split()), p)
    for words, p in (("loved despised", 0.8), ("liked disliked", 0.1)):
        assert_fraction(np.isin(words_at(sample, "VERB")[is_strong], words.split()), p)
    agree, has_and = np.diff(latents.polarity) == 0, words_at(sample, "CONN") == "and"
    assert_fraction(has_and[agree], 0.75)
    assert_fraction(has_and[~agree], 0.25)
    is_positive = latents.sentiment == 1
    assert_fraction(words_at(sample, "TAG")[is_positive] == "popcorn", 0.02)
    seeded = [Grammar().sample(50, np.random.default_rng(seed)).tokens for seed in (3, 3, 4)]
    assert (seeded[0] == seeded[1]).all() and (seeded[0] != seeded[2]).any()


def test_review_has_words_of_its_slots():
    grammar, words = Grammar(), REVIEW.split()
    for t, slot in enumerate(grammar.slots[1:-1]):
        for word in (*VOCABULARY, "rocks"):
            text = " ".join([*words[:t], word, *words[t + 1 :]])
            assert grammar.is_review(text) == (word in slot.words)
    others = ["", REVIEW + " ", " " + REVIEW, REVIEW.replace(" . ", "  . "), REVIEW + " thanks"]
    others += ["<bos> " + REVIEW, REVIEW.upper(), REVIEW.replace(" ,", ","), REVIEW[:-7]]
    assert not any(map(grammar.is_review, others))
    assert not Grammar(1).is_review(REVIEW)
