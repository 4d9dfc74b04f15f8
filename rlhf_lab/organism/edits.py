"""Minimal edits of Reel reviews: one word is replaced by its opposite, and the rest stays."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from rlhf_lab.organism.grammar import Grammar
from rlhf_lab.organism.lexicon import ADJECTIVES, CONNECTORS, COPULAS, TAGS, VERBS
from rlhf_lab.organism.rewards import read_features, sentiment_logit


def _opposites() -> dict[str, str]:
    """Of each word that has one: the same tier and place with the other sign; the other copula."""
    found = {}
    for sign in (1, -1):
        for group, other in zip(ADJECTIVES[sign], ADJECTIVES[-sign], strict=True):
            found |= dict(zip(group, other, strict=True))
        found |= dict(zip(VERBS[sign], VERBS[-sign], strict=True))
    for pair in (COPULAS, CONNECTORS):
        found |= {pair[0]: pair[1], pair[1]: pair[0]}
    return found | dict.fromkeys(TAGS, "popcorn")


def replace_word(
    texts: Sequence[str], slot: str, clause: int | None = None, grammar: Grammar | None = None
) -> list[str]:
    """Replace the word at one slot of each review by its opposite; a tag becomes popcorn.

    Args:
        texts: grammatical reviews.
        slot, clause: "ADJ", "COP" or "CONN" with the number of a clause, from 0; "VERB"; "TAG".

    Raises ValueError for a slot whose words have no opposite, and for a text that is too short.
    """
    place = (grammar or Grammar()).slot(slot, clause) - 1  # <bos> is no word of a text
    opposites, edited = _opposites(), []
    for text in texts:
        words = text.split()
        if place >= len(words) or words[place] not in opposites:
            raise ValueError(
                f"{text!r} has no word with an opposite at {slot}; give whole reviews, and ADJ, "
                "COP, CONN, VERB or TAG."
            )
        words[place] = opposites[words[place]]
        edited.append(" ".join(words))
    return edited


def true_log_odds(texts: Sequence[str]) -> Float[np.ndarray, " text"]:
    """Give log P(y=+ | text) - log P(y=- | text), the exact log odds that a text is positive."""
    return sentiment_logit(read_features(list(texts), Grammar()))
