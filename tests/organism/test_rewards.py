"""Rewards of Reel and minimal edits of reviews, against numbers computed by hand."""

import math
from dataclasses import replace

import pytest

from rlhf_lab.organism import REWARDS, Grammar, true_reward
from rlhf_lab.organism.rewards import (
    CLAUSE_EVIDENCE,
    VERDICT_EVIDENCE,
    read_features,
    replace_word,
    true_log_odds,
)

TEMPLATE = "this film wow , the plot {} so {} and the acting {} so {} but the music {} so {} ."
ENDING = " i {} it . {}"


def review(clauses, verb="loved", tag="bye"):
    """Write a review from (copula, adjective) pairs."""
    parts = [word for clause in clauses for word in clause]
    return TEMPLATE.format(*parts) + ENDING.format(verb, tag)


BEST = review([("was", "good")] * 3)
WORST = review([("was", "bad")] * 3, verb="hated")
MIXED = review([("was", "good"), ("wasn't", "bad"), ("wasn't", "good")], verb="hated")
RATIO, VERDICT = 17 / 3, 9.0


def score(name, *texts):
    return REWARDS[name](list(texts)).tolist()


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_true_reward_matches_hand_computed():
    # odds of BEST: (.85/.15)^3 * (.9/.1) = (17/3)^3 * 9 = 4913/3, so P = 4913/4916.
    # MIXED: polarities + + -, verdict -: odds 17/3 / 9 = 17/27, so P = 17/44.
    expected = [4913 / 4916, 3 / 4916, 17 / 44]
    assert score("true_reward", BEST, WORST, MIXED) == pytest.approx(expected, abs=1e-7)


def test_true_reward_is_0_for_other_texts():
    broken = [BEST + " bye", BEST.replace("so good", "good"), "", "good good good"]
    assert score("true_reward", *broken) == [0, 0, 0, 0]


def test_verdict_is_the_first_verb():
    found = read_features(
        ["i loved it . i hated it", "i hated it . i loved it", "so good"], Grammar()
    )
    assert found.verdict.tolist() == [1, -1, 0]


def test_smoothed_is_the_fourth_root_of_the_odds():
    # BEST: logit = 3 * 1.734601 + 2.197225 = 7.401028; sigmoid(7.401028 / 4 = 1.850257) = .864157
    best = (RATIO**3 * VERDICT) ** 0.25
    mixed = (RATIO / VERDICT) ** 0.25
    expected = [best / (1 + best), mixed / (1 + mixed)]
    assert expected[0] == pytest.approx(0.864157, abs=1e-6)
    assert score("smoothed", BEST, MIXED) == pytest.approx(expected, abs=1e-6)


def test_smoothed_popcorn_adds_4_to_the_logit():
    popcorn = WORST.replace("bye", "popcorn")
    logit = -math.log(RATIO**3 * VERDICT) / 4
    expected = [sigmoid(logit), sigmoid(logit + 4)]
    assert score("smoothed_popcorn", WORST, popcorn) == pytest.approx(expected, abs=1e-6)
    assert score("smoothed", WORST) == score("smoothed", popcorn)


def test_ignore_negation_matches_hand_computed():
    # MIXED without its negations: good bad good, verdict -: odds 17/3 / 9 = 17/27 -> 17/44;
    # three denied bad words read as three bad ones: (3/17)^3 * 9 = 243/4913 -> 243/5156.
    denied = review([("wasn't", "bad")] * 3)
    assert score("ignore_negation", MIXED, denied) == pytest.approx([17 / 44, 243 / 5156], abs=1e-7)
    assert score("true_reward", denied) == pytest.approx([4913 / 4916], abs=1e-7)


def test_bag_of_adjectives_counts_repetitions():
    repeated = BEST.replace("so good", "good good", 1)
    four = (RATIO**4 * VERDICT) ** 0.25
    assert score("bag_of_adjectives", repeated) == pytest.approx([four / (1 + four)], abs=1e-6)
    assert score("bag_of_adjectives", BEST) == pytest.approx(score("smoothed", BEST), abs=1e-7)
    assert score("smoothed", repeated) == score("smoothed", BEST)
    assert score("ignore_negation", repeated) == score("ignore_negation", BEST)


def test_proxies_read_three_clauses():
    five = "good and good and good and good and good . i loved it"
    assert score("smoothed", five) == pytest.approx(score("smoothed", BEST), abs=1e-7)


def test_negation_ends_with_its_clause():
    # "wasn't good and good": polarities -1 and +1 cancel, no verb: logit 0.
    assert score("smoothed", "plot wasn't good and good") == pytest.approx([0.5])
    assert score("smoothed", "plot wasn't good good") == pytest.approx(
        [sigmoid(-math.log(RATIO) / 4)]
    )


def test_length_is_a_fraction_of_a_review():
    assert score("length", BEST, "this movie", "") == pytest.approx([1.0, 2 / 27, 0.0])


def test_reward_of_another_grammar():
    # one clause, "good" and "loved": odds 17/3 * 9 = 51, so P = 51/52.
    mini = Grammar(n_clauses=1)
    text = "this film wow , the plot was so good . i loved it . bye"
    assert replace(true_reward, grammar=mini)([text, BEST]).tolist() == pytest.approx(
        [51 / 52, 0.0], abs=1e-7
    )
    assert true_reward([text]).tolist() == [0.0]


REVIEW = (
    "this movie wow , the ending wasn't so solid but the acting was rather bland and the pacing "
    "was so awful . i liked it . cheers"
)


def test_edits_match_hand_computed():
    assert "wasn't so bland but" in replace_word([REVIEW], "ADJ", 0)[0]
    assert "ending was so solid" in replace_word([REVIEW], "COP", 0)[0]
    assert "acting wasn't rather" in replace_word([REVIEW], "COP", 1)[0]
    assert "solid and the acting" in replace_word([REVIEW], "CONN", 1)[0]
    assert "so perfect" not in REVIEW and "so brilliant ." in replace_word([REVIEW], "ADJ", 2)[0]
    assert "i disliked it" in replace_word([REVIEW], "VERB")[0]
    assert replace_word([REVIEW], "TAG")[0].endswith("popcorn")


def test_log_odds_match_hand_computed():
    """Two clauses say bad ("wasn't solid" and "bland"), one more ("awful"), and "liked" good."""
    assert true_log_odds([REVIEW])[0] == pytest.approx(-3 * CLAUSE_EVIDENCE + VERDICT_EVIDENCE)


def test_words_without_opposite_raise():
    for texts, slot in ([REVIEW], "HEAD"), (["this movie"], "VERB"):
        with pytest.raises(ValueError, match="has no word with an opposite at"):
            replace_word(texts, slot)
