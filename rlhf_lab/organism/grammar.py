"""The Reel grammar: sample, decode and recognize movie reviews whose latents are known."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from rlhf_lab.organism.lexicon import (
    ADVERBS,
    ALL_ADJECTIVES,
    ALL_VERBS,
    ASPECTS,
    BOS,
    CONNECTORS,
    COPULAS,
    EOS,
    HEADS,
    OPENERS,
    P_FLIP,
    P_NEGATION,
    P_POLARITY,
    P_TAGS,
    P_TIER,
    P_TYPICAL_ADVERB,
    P_VERDICT,
    STYLES,
    TAGS,
    TIERS,
    VOCABULARY,
    WORD_IDS,
    flat,
)


class Slot(NamedTuple):
    """One position of a review: its name, its clause (None outside clauses) and its words."""

    name: str
    clause: int | None
    words: tuple[str, ...]


@dataclass(frozen=True)
class Latents:
    """The hidden choices of reviews: signs are +1 or -1, everything else counts from 0."""

    sentiment: Int[np.ndarray, " batch"]
    intensity: Int[np.ndarray, " batch"]
    style: Int[np.ndarray, " batch"]
    polarity: Int[np.ndarray, "batch clause"]
    negation: Bool[np.ndarray, "batch clause"]
    aspect: Int[np.ndarray, "batch clause"]
    verdict: Int[np.ndarray, " batch"]


@dataclass(frozen=True)
class Reviews:
    """Sampled reviews: token ids with <bos> and <eos>, and their latents."""

    tokens: Int[np.ndarray, "batch seq"]
    latents: Latents

    def texts(self) -> list[str]:
        """Decode every review, without <bos> and <eos>."""
        return [decode(row) for row in self.tokens]


def decode(
    tokens: Iterable[int] | Int[np.ndarray, " seq"], vocabulary: Sequence[str] = VOCABULARY
) -> str:
    """Join the words of token ids with single spaces, without <bos> and <eos>.

    Raises ValueError for an id outside the vocabulary.
    """
    ids = [int(token) for token in tokens]
    if any(not 0 <= i < len(vocabulary) for i in ids):
        raise ValueError(
            f"tokens has an id outside 0..{len(vocabulary) - 1}: {ids}. Use valid ids."
        )
    return " ".join(vocabulary[i] for i in ids if vocabulary[i] not in (BOS, EOS))


def sample_sign(
    probability: float, shape: tuple[int, ...], rng: np.random.Generator
) -> Int[np.ndarray, "*shape"]:
    """Draw +1 with the given probability and -1 otherwise."""
    return np.where(rng.random(shape) < probability, 1, -1)


def sample_third(
    truth: Int[np.ndarray, " batch"], p: float, n_draws: int, rng: np.random.Generator
) -> Int[np.ndarray, "batch draw"]:
    """Draw `truth` with probability `p`, otherwise one of the other two of three."""
    shape = (len(truth), n_draws)
    other = rng.integers(1, 3, shape)
    return (truth[:, None] + np.where(rng.random(shape) < p, 0, other)) % 3


@dataclass(frozen=True)
class Grammar:
    """The Reel language with a given number of clauses (3: Reel; 1: reel-mini, enumerable).

    The latents of a review: sentiment y is +1 or -1 (1/2 each); intensity i and style r are
    uniform on three; every clause has an aspect (uniform on 8), a polarity (y w.p. 0.85), and is
    negated w.p. 0.2. Then the words:

    HEAD uniform; OPEN uniform on the style's three; ASP the aspect; COP "wasn't" if negated;
    ADV one of the style's two w.p. 0.7, else one of the other four; ADJ of sign
    polarity * (-1 if negated) and tier i w.p. 0.8 (else the others equally), uniform on four;
    CONN "and" if the clause agrees with the one before, else "but", exchanged w.p. 0.25;
    VERB of sign y w.p. 0.9 and tier drawn as an adjective's; TAG independent of all.
    """

    n_clauses: int = 3

    def __post_init__(self) -> None:
        if not isinstance(self.n_clauses, int) or self.n_clauses < 1:
            raise ValueError(f"n_clauses is {self.n_clauses}. Use an integer of at least 1.")

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """The positions of a review, <bos> and <eos> included."""
        before = (("BOS", (BOS,)), ("THIS", ("this",)), ("HEAD", HEADS), ("OPEN", flat(OPENERS)))
        clause = (("THE", ("the",)), ("ASP", ASPECTS), ("COP", COPULAS), ("ADV", flat(ADVERBS)))
        after = (("STOP", (".",)), ("I", ("i",)), ("VERB", ALL_VERBS), ("IT", ("it",)))
        last = (("END", (".",)), ("TAG", TAGS), ("EOS", (EOS,)))
        slots = [Slot(name, None, words) for name, words in (*before, ("COMMA", (",",)))]
        for k in range(self.n_clauses):
            joined = (("CONN", CONNECTORS),) if k else ()
            filled = (*joined, *clause, ("ADJ", ALL_ADJECTIVES))
            slots += [Slot(name, k, words) for name, words in filled]
        return tuple(slots + [Slot(name, None, words) for name, words in (*after, *last)])

    @property
    def seq_len(self) -> int:
        """The number of tokens in a review, <bos> and <eos> included."""
        return len(self.slots)

    def positions(self, name: str) -> tuple[int, ...]:
        """Return every position of a slot; <bos> is at 0.

        Raises ValueError for an unknown name.
        """
        positions = tuple(t for t, slot in enumerate(self.slots) if slot.name == name)
        if not positions:
            known = ", ".join(dict.fromkeys(slot.name for slot in self.slots))
            raise ValueError(f"name is {name!r}, which no slot has. Choose one of {known}.")
        return positions

    def slot(self, name: str, clause: int | None = None) -> int:
        """Return the position of one slot; clauses count from 0, CONN has the clause it opens.

        Raises ValueError for an unknown name, or without a clause if the slot is in several.
        """
        found = [t for t in self.positions(name) if clause in (None, self.slots[t].clause)]
        if len(found) != 1:
            clauses = [self.slots[t].clause for t in self.positions(name)]
            raise ValueError(f"clause is {clause} for slot {name!r}. Choose one of {clauses}.")
        return found[0]

    def sample(self, n: int, rng: np.random.Generator) -> Reviews:
        """Draw n reviews with their latents.

        tokens has shape [n, seq_len]. Raises ValueError for a negative n.
        """
        if n < 0:
            raise ValueError(f"n is {n}. Use at least 0 reviews.")
        latents = self._sample_latents(n, rng)
        return Reviews(self._write(latents, rng), latents)

    def _sample_latents(self, n: int, rng: np.random.Generator) -> Latents:
        shape = (n, self.n_clauses)
        sentiment = sample_sign(0.5, (n,), rng)
        return Latents(
            sentiment=sentiment,
            intensity=rng.integers(0, len(TIERS), n),
            style=rng.integers(0, len(STYLES), n),
            polarity=sentiment[:, None] * sample_sign(P_POLARITY, shape, rng),
            negation=rng.random(shape) < P_NEGATION,
            aspect=rng.integers(0, len(ASPECTS), shape),
            verdict=sentiment * sample_sign(P_VERDICT, (n,), rng),
        )

    def _write(self, latents: Latents, rng: np.random.Generator) -> Int[np.ndarray, "batch seq"]:
        n, clauses = len(latents.sentiment), self.n_clauses
        tokens = np.tile([WORD_IDS[slot.words[0]] for slot in self.slots], (n, 1))
        tiers = sample_third(latents.intensity, P_TIER, clauses + 1, rng)
        styles = sample_third(latents.style, P_TYPICAL_ADVERB, clauses, rng)
        adverbs = 2 * styles + rng.integers(0, 2, (n, clauses))
        lexical = np.where(latents.negation, -1, 1) * latents.polarity
        agree = latents.polarity[:, 1:] == latents.polarity[:, :-1]
        flip = rng.random(agree.shape) < P_FLIP
        words = {
            "HEAD": rng.integers(0, len(HEADS), (n, 1)),
            "OPEN": (3 * latents.style + rng.integers(0, 3, n))[:, None],
            "ASP": latents.aspect,
            "COP": latents.negation.astype(int),
            "ADV": adverbs,
            "ADJ": 12 * (lexical < 0) + 4 * tiers[:, :clauses] + rng.integers(0, 4, (n, clauses)),
            "CONN": (agree == flip).astype(int),
            "VERB": (3 * (latents.verdict < 0) + tiers[:, clauses])[:, None],
            "TAG": rng.choice(len(TAGS), (n, 1), p=P_TAGS),
        }
        for name, index in words.items():
            if index.shape[1]:
                tokens[:, list(self.positions(name))] += index
        return tokens

    def is_review(self, text: str) -> bool:
        """Return True if a text is one whole review, with single spaces between words."""
        words, slots = text.split(" "), self.slots[1:-1]
        return len(words) == len(slots) and all(
            word in slot.words for word, slot in zip(words, slots, strict=True)
        )
