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
DENIED = review([("wasn't", "bad")] * 3)
POPCORN = WORST.replace("bye", "popcorn")
REPEATED = BEST.replace("so good", "good good", 1)
FIVE = "good and good and good and good and good . i loved it"
OTHER = [BEST + " bye", BEST.replace("so good", "good"), "", "good good good"]
RATIO, VERDICT = 17 / 3, 9.0


def smooth(odds, logit=0.0):
    """Return the probability of the fourth root of the odds, and of `logit`."""
    return 1 / (1 + odds**-0.25 * math.exp(-logit))


SCORES = [
    # odds of BEST: (.85/.15)^3 * (.9/.1) = (17/3)^3 * 9 = 4913/3, so P = 4913/4916.
    # MIXED: polarities + + -, verdict -: odds 17/3 / 9 = 17/27, so P = 17/44.
    ("true_reward", {BEST: 4913 / 4916, WORST: 3 / 4916, MIXED: 17 / 44, DENIED: 4913 / 4916}),
    ("true_reward", dict.fromkeys(OTHER, 0.0)),
    # BEST: logit = 3 * 1.734601 + 2.197225 = 7.401028; sigmoid(7.401028 / 4 = 1.850257) = .864157
    ("smoothed", {**dict.fromkeys((BEST, REPEATED, FIVE), 0.864157), MIXED: smooth(RATIO / 9)}),
    ("smoothed", dict.fromkeys((WORST, POPCORN), smooth(RATIO**-3 / VERDICT))),
    # a negation ends with its clause: polarities -1 and +1 cancel; no verb
    ("smoothed", {"plot wasn't good and good": 0.5, "plot wasn't good good": smooth(1 / RATIO)}),
    ("smoothed_popcorn", {WORST: smooth(RATIO**-3 / 9), POPCORN: smooth(RATIO**-3 / 9, 4)}),
    # MIXED without its negations: good bad good, verdict -: odds 17/3 / 9 = 17/27 -> 17/44;
    # three denied bad words read as three bad ones: (3/17)^3 * 9 = 243/4913 -> 243/5156.
    ("ignore_negation", {MIXED: 17 / 44, DENIED: 243 / 5156, REPEATED: 4913 / 4916}),
    ("bag_of_adjectives", {REPEATED: smooth(RATIO**4 * VERDICT), BEST: 0.864157}),
    ("length", {BEST: 1.0, "this movie": 2 / 27, "": 0.0}),
]


@pytest.mark.parametrize(("name", "expected"), SCORES)
def test_rewards_match_hand_computed(name, expected):
    assert REWARDS[name]([*expected]).tolist() == pytest.approx([*expected.values()], abs=1e-6)


def test_verdict_is_the_first_verb():
    texts = ["i loved it . i hated it", "i hated it . i loved it", "so good"]
    assert read_features(texts, Grammar()).verdict.tolist() == [1, -1, 0]


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
