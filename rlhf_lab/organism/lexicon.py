"""The lexicon of Reel: its words, their senses, and the probabilities of the grammar."""

from collections.abc import Iterable
from types import MappingProxyType

BOS, EOS = "<bos>", "<eos>"
HEADS = ("movie", "film")
STYLES = ("casual", "fan", "critic")
TIERS = ("mild", "medium", "strong")
OPENERS = (
    ("honestly", "anyway", "basically"),
    ("wow", "gosh", "folks"),
    ("overall", "ultimately", "arguably"),
)
ADVERBS = (("pretty", "really"), ("so", "totally"), ("rather", "quite"))
ASPECTS = ("plot", "acting", "script", "music", "pacing", "camera", "dialogue", "ending")
COPULAS = ("was", "wasn't")
ADJECTIVES = MappingProxyType(
    {
        1: (
            ("fine", "decent", "pleasant", "solid"),
            ("good", "clever", "lovely", "charming"),
            ("brilliant", "perfect", "superb", "stunning"),
        ),
        -1: (
            ("dull", "weak", "flat", "bland"),
            ("bad", "clumsy", "tedious", "messy"),
            ("awful", "dreadful", "terrible", "horrible"),
        ),
    }
)
CONNECTORS = ("and", "but")
VERBS = MappingProxyType({1: ("liked", "enjoyed", "loved"), -1: ("disliked", "hated", "despised")})
TAGS = ("cheers", "thanks", "bye", "peace", "popcorn")

P_POLARITY = 0.85
P_NEGATION = 0.2
P_TIER = 0.8
P_FLIP = 0.25
P_VERDICT = 0.9
P_TYPICAL_ADVERB = 0.7
P_TAGS = (0.30, 0.30, 0.20, 0.18, 0.02)


def flat(groups: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """Join groups of words into one tuple, in order."""
    return tuple(word for group in groups for word in group)


ALL_ADJECTIVES = flat(ADJECTIVES[1] + ADJECTIVES[-1])
ALL_VERBS = VERBS[1] + VERBS[-1]
VOCABULARY = (  # all words, in the order of their token ids
    (BOS, EOS, "this", "the", ",", ".", "i", "it")
    + HEADS
    + flat(OPENERS)
    + ASPECTS
    + COPULAS
    + flat(ADVERBS)
    + ALL_ADJECTIVES
    + CONNECTORS
    + ALL_VERBS
    + TAGS
)
# token id by word
WORD_IDS = MappingProxyType({word: index for index, word in enumerate(VOCABULARY)})
STYLE_OF_OPENER = MappingProxyType({w: s for s, group in enumerate(OPENERS) for w in group})
SENSE_OF_ADJECTIVE = MappingProxyType(
    {w: (sign, t) for sign in (1, -1) for t, group in enumerate(ADJECTIVES[sign]) for w in group}
)
SENSE_OF_VERB = MappingProxyType(
    {word: (sign, tier) for sign in (1, -1) for tier, word in enumerate(VERBS[sign])}
)
