"""Minimal edits of reviews: one word changes, and the truth changes by what the word is worth."""

import numpy as np
import pytest

from rlhf_lab.organism import Grammar, grammatical
from rlhf_lab.organism.rewards import CLAUSE_EVIDENCE, VERDICT_EVIDENCE, replace_word, true_log_odds

REVIEW = (
    "this movie wow , the ending wasn't so solid but the acting was rather bland and the pacing "
    "was so awful . i liked it . cheers"
)


def test_edits_by_hand():
    assert "wasn't so bland but" in replace_word([REVIEW], "ADJ", 0)[0]
    assert "ending was so solid" in replace_word([REVIEW], "COP", 0)[0]
    assert "acting wasn't rather" in replace_word([REVIEW], "COP", 1)[0]
    assert "solid and the acting" in replace_word([REVIEW], "CONN", 1)[0]
    assert "so perfect" not in REVIEW and "so brilliant ." in replace_word([REVIEW], "ADJ", 2)[0]
    assert "i disliked it" in replace_word([REVIEW], "VERB")[0]
    assert replace_word([REVIEW], "TAG")[0].endswith("popcorn")


def test_log_odds_by_hand():
    """Two clauses say bad ("wasn't solid" and "bland"), one more ("awful"), and "liked" good."""
    expected = -3 * CLAUSE_EVIDENCE + VERDICT_EVIDENCE
    assert true_log_odds([REVIEW])[0] == pytest.approx(expected)


@pytest.mark.parametrize("slot", ["ADJ", "COP", "VERB", "CONN", "TAG"])
def test_one_word_changes_and_the_truth_by_its_worth(slot):
    texts = Grammar().sample(60, np.random.default_rng(0)).texts()
    clause = None if slot in ("VERB", "TAG") else 2
    edited = replace_word(texts, slot, clause)
    apart = [
        sum(a != b for a, b in zip(one.split(), other.split(), strict=True))
        for one, other in zip(texts, edited, strict=True)
    ]
    assert max(apart) == 1 and grammatical(edited).all()
    worth = {"ADJ": 2 * CLAUSE_EVIDENCE, "COP": 2 * CLAUSE_EVIDENCE, "VERB": 2 * VERDICT_EVIDENCE}
    changed = np.abs(true_log_odds(edited) - true_log_odds(texts))
    np.testing.assert_allclose(changed, worth.get(slot, 0.0), atol=1e-9)
    if slot != "TAG":  # the opposite of the opposite
        assert replace_word(edited, slot, clause) == texts


def test_what_has_no_opposite_is_refused():
    for texts, slot in ([REVIEW], "HEAD"), (["this movie"], "VERB"):
        with pytest.raises(ValueError, match="has no word with an opposite at"):
            replace_word(texts, slot)
