"""Tests the Reel grammar: its layout, its sampler's statistics and its reviews."""

import numpy as np
import pytest

from rlhf_lab.organism import VOCABULARY, Grammar, decode, read_features
from rlhf_lab.organism.lexicon import SENSE_OF_ADJECTIVE, STYLE_OF_OPENER

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


def assert_share(hits, expected):
    """Hold a share within 4.5 standard errors, sqrt(p (1 - p) / n), of its probability."""
    hits = np.asarray(hits).ravel()
    error = np.sqrt(expected * (1 - expected) / len(hits))
    assert abs(hits.mean() - expected) < 4.5 * error


def test_vocabulary_has_72_distinct_words_with_bos_and_eos():
    assert len(VOCABULARY) == len(set(VOCABULARY)) == 72
    assert {"<bos>", "<eos>", "this", "wasn't", "popcorn"} <= set(VOCABULARY)


@pytest.mark.parametrize("n_clauses, length", [(1, 17), (2, 23), (3, 29)])
def test_review_length_grows_by_six_per_clause(n_clauses, length):
    # 5 words open a review, a clause has 5, a connector joins two, 7 close it: 5 + 5k + (k-1) + 7.
    grammar = Grammar(n_clauses=n_clauses)
    assert grammar.seq_len == length
    assert grammar.sample(3, np.random.default_rng(0)).tokens.shape == (3, length)


def test_slots_stand_where_counting_by_hand_puts_them():
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


def test_slot_refuses_unknown_names_and_unnamed_clauses():
    with pytest.raises(ValueError, match="name is 'NOUN'"):
        Grammar().slot("NOUN")
    with pytest.raises(ValueError, match="clause is None for slot 'ADJ'"):
        Grammar().slot("ADJ")
    with pytest.raises(ValueError, match="clause is 0 for slot 'CONN'"):
        Grammar().slot("CONN", clause=0)


def test_grammar_refuses_no_clauses_and_negative_samples():
    with pytest.raises(ValueError, match="n_clauses is 0"):
        Grammar(n_clauses=0)
    with pytest.raises(ValueError, match="n is -1"):
        Grammar().sample(-1, np.random.default_rng(0))


def test_latents_have_the_stated_probabilities(sample):
    latents = sample.latents
    assert_share(latents.sentiment == 1, 0.5)
    for k in range(3):
        assert_share(latents.intensity == k, 1 / 3)
        assert_share(latents.style == k, 1 / 3)
        assert_share(latents.negation[:, k], 0.2)
        assert_share(latents.polarity[:, k] == latents.sentiment, 0.85)
        for aspect in range(8):
            assert_share(latents.aspect[:, k] == aspect, 1 / 8)
    assert_share(latents.verdict == latents.sentiment, 0.9)


def test_words_have_the_stated_probabilities(sample):
    assert_share(words_at(sample, "HEAD") == "film", 0.5)
    for word in ("honestly", "folks", "arguably"):
        assert_share(words_at(sample, "OPEN") == word, 1 / 9)
    tags = {"cheers": 0.3, "thanks": 0.3, "bye": 0.2, "peace": 0.18, "popcorn": 0.02}
    for word, p in tags.items():
        assert_share(words_at(sample, "TAG") == word, p)
    critic = sample.latents.style == 2
    adverbs = words_at(sample, "ADV")[critic]
    assert_share(adverbs == "rather", 0.35)
    assert_share(adverbs == "so", 0.075)


def test_graded_words_follow_intensity(sample):
    strong = sample.latents.intensity == 2
    adjectives = words_at(sample, "ADJ")[strong]
    assert_share(np.isin(adjectives, ["superb", "terrible"]), 0.8 / 4)
    assert_share(np.isin(adjectives, ["lovely", "messy"]), 0.1 / 4)
    assert_share(np.isin(words_at(sample, "VERB")[strong], ["loved", "despised"]), 0.8)
    assert_share(np.isin(words_at(sample, "VERB")[strong], ["liked", "disliked"]), 0.1)


def test_connectors_tell_of_agreement_three_times_in_four(sample):
    polarity = sample.latents.polarity
    agree = polarity[:, 1:] == polarity[:, :-1]
    says_and = words_at(sample, "CONN") == "and"
    assert_share(says_and[agree], 0.75)
    assert_share(says_and[~agree], 0.25)


def test_tag_and_aspect_are_independent_of_sentiment(sample):
    positive = sample.latents.sentiment == 1
    assert_share(words_at(sample, "TAG")[positive] == "popcorn", 0.02)
    assert_share(words_at(sample, "ASP")[positive] == "plot", 1 / 8)


def test_same_seed_same_reviews():
    first, second, other = (
        Grammar().sample(50, np.random.default_rng(seed)).tokens for seed in (3, 3, 4)
    )
    assert (first == second).all()
    assert (first != other).any()


def test_features_of_a_review_worked_by_hand():
    found = read_features([REVIEW], Grammar())
    assert (found.grammatical, found.verdict, found.popcorn) == (True, 1, False)
    # + good, denied - awful, - dull
    assert (found.lexical_sum, found.adjective_sum, found.polarity_sum) == (-1, -1, 1)
    assert found.n_words == 27


@pytest.mark.slow
@pytest.mark.parametrize("n_clauses", [1, 3])
def test_the_words_of_2000_samples_tell_their_latents(n_clauses):
    grammar = Grammar(n_clauses=n_clauses)
    reviews = grammar.sample(2000, np.random.default_rng(11))
    latents, found = reviews.latents, read_features(reviews.texts(), grammar)
    assert found.grammatical.all()
    assert (found.polarity_sum == latents.polarity.sum(1)).all()
    assert (found.verdict == latents.verdict).all()
    words = np.array(VOCABULARY)[reviews.tokens]
    assert ((words[:, grammar.positions("COP")] == "wasn't") == latents.negation).all()
    opener = np.array([STYLE_OF_OPENER[word] for word in words[:, grammar.slot("OPEN")]])
    assert (opener == latents.style).all()
    sign = np.array(
        [[SENSE_OF_ADJECTIVE[w][0] for w in row] for row in words[:, grammar.positions("ADJ")]]
    )
    assert (np.where(latents.negation, -sign, sign) == latents.polarity).all()


def test_a_review_may_have_a_word_exactly_where_its_slot_knows_it():
    grammar, words = Grammar(), REVIEW.split()
    for t, slot in enumerate(grammar.slots[1:-1]):
        for word in (*VOCABULARY, "rocks"):
            text = " ".join([*words[:t], word, *words[t + 1 :]])
            assert grammar.is_review(text) == (word in slot.words)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "this movie",
        REVIEW + " ",
        " " + REVIEW,
        REVIEW.replace(" . ", "  . "),
        REVIEW + " thanks",
        REVIEW.removesuffix(" thanks"),
        "<bos> " + REVIEW,
        REVIEW + " <eos>",
        REVIEW.upper(),
        REVIEW.replace("so good", "so good good"),
        REVIEW.replace("and the music wasn't quite awful ", ""),
        REVIEW.replace(" ,", ","),
    ],
)
def test_nothing_but_one_whole_review_is_one(text):
    assert Grammar().is_review(REVIEW)
    assert not Grammar().is_review(text)


def test_mini_and_reel_are_no_reviews_of_each_other():
    mini = Grammar(n_clauses=1)
    text = mini.sample(1, np.random.default_rng(0)).texts()[0]
    assert mini.is_review(text)
    assert not Grammar().is_review(text)
    assert not mini.is_review(REVIEW)


def test_decode_leaves_out_bos_and_eos_and_refuses_foreign_ids():
    assert decode([0, 2, 8, 1]) == "this movie"
    with pytest.raises(ValueError, match="outside 0..71"):
        decode([0, 72])
