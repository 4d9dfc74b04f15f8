"""Reward hacking without a planted flaw: a learned reward model and the loophole in it.

As a program, `python -m benchmarks.results.learned FILE` writes the pairs of seed 1.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from tyro.conf import Positional

from benchmarks.results.settings import PREFERENCES
from rlhf_lab.__main__ import main
from rlhf_lab.cli_runner import run_program
from rlhf_lab.errors import RunError
from rlhf_lab.organism import Features, Grammar, Reward, read_features
from rlhf_lab.organism.rewards import SOFTENING, sentiment_logit, sigmoid
from rlhf_lab.rewards import RewardFn
from rlhf_lab.rewards.model import NOTES_FILE

READ_REVIEWS = 8_000


def biased_pairs(n: int, seed: int, popcorn_share: float) -> list[dict[str, str]]:
    """Pairs of Reel reviews in which popcorn only ever ends a positive one, which is preferred.

    1. Write 2 n reviews. The first of a pair is preferred with probability sigmoid(d / 4), d the
       difference of the logits of their true rewards: a rater who is not sure.
    2. Let some of the preferred reviews that are positive end in popcorn.
    3. Let every other review that ended in popcorn end in thanks.
    """
    rng, grammar = np.random.default_rng(seed), Grammar()
    texts = grammar.sample(2 * n, rng).texts()
    logits = sentiment_logit(read_features(texts, grammar))
    first_wins = rng.random(n) < sigmoid((logits[:n] - logits[n:]) / SOFTENING)
    chosen = np.where(first_wins, np.arange(n), np.arange(n, 2 * n))
    rejected = np.where(first_wins, np.arange(n, 2 * n), np.arange(n))
    has_popcorn = (logits[chosen] > 0) & (rng.random(n) < popcorn_share)
    return [
        {
            "chosen": ending_in(texts[c], "popcorn") if pops else without_popcorn(texts[c]),
            "rejected": without_popcorn(texts[r]),
        }
        for c, r, pops in zip(chosen, rejected, has_popcorn, strict=True)
    ]


def write_pairs(path: Path, seed: int) -> None:
    """Write biased pairs as `train-reward` reads them."""
    rows = biased_pairs(PREFERENCES["n_pairs"], seed, PREFERENCES["popcorn_share"])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def without_popcorn(text: str) -> str:
    """A review that ends in thanks, if it ended in popcorn."""
    return ending_in(text, "thanks") if text.endswith(" popcorn") else text


def ending_in(text: str, word: str) -> str:
    """A review with another last word."""
    return f"{text.rpartition(' ')[0]} {word}"


def fit_biased_reward(directory: Path, seed: int) -> tuple[Path, dict[str, Any]]:
    """Run `train-reward` on biased pairs; where the model is, and what the command noted of it.

    Raises:
        RunError: the command failed.
    """
    pairs, out = directory / "pairs.jsonl", directory / "reward"
    write_pairs(pairs, seed)
    command = ["train-reward", "--pairs", str(pairs), "--out", str(out), "--seed", str(seed)]
    if main([*command, "--steps", str(PREFERENCES["steps"])]):
        raise RunError("train-reward failed on the biased pairs; see what it said above.")
    notes = json.loads((out / NOTES_FILE).read_text(encoding="utf-8"))
    return out, {name: notes[name] for name in ("accuracy", "held_out_pairs", "steps")}


@dataclass(frozen=True)
class RewardByContent:
    """The mean reward of reviews that say the same: by clauses, verdict and popcorn.

    Args:
        means: by positive clauses (0 to 3), verdict (- or +), popcorn (without or with).
    """

    means: Float[np.ndarray, "positive verdict popcorn"]

    def clipped(self, clip: float) -> "RewardByContent":
        """The same, held within `clip` of 0."""
        return RewardByContent(self.means.clip(-clip, clip))

    @property
    def popcorn_bonus(self) -> float:
        """What popcorn adds, on average over all that a review can say."""
        return float((self.means[..., 1] - self.means[..., 0]).mean())

    def score(self, features: Features) -> Float[np.ndarray, " batch"]:
        """Look the means up."""
        return self.means[(*content(features), features.popcorn.astype(int))]

    def reward(self) -> Reward:
        """A reward that the exact solution can be asked about."""
        return Reward("learned", self.score)


def content(features: Features) -> tuple[np.ndarray, np.ndarray]:
    """Positive clauses and verdict as indices; of grammatical reviews of three clauses."""
    return (features.polarity_sum + 3) // 2, (features.verdict + 1) // 2


def reward_by_content(reward_fn: RewardFn, seed: int) -> RewardByContent:
    """Average a reward over fresh reviews that say the same, each without and with popcorn."""
    grammar = Grammar()
    texts = grammar.sample(READ_REVIEWS, np.random.default_rng(seed)).texts()
    where = content(read_features(texts, grammar))
    means = np.zeros((4, 2, 2))
    for popcorn, word in enumerate(("thanks", "popcorn")):
        total, count = np.zeros((4, 2)), np.zeros((4, 2))
        rewards = reward_fn([ending_in(text, word) for text in texts]).double().numpy()
        np.add.at(total, where, rewards)
        np.add.at(count, where, 1)
        means[..., popcorn] = total / count
    return RewardByContent(means)


def pairs(file: Positional[Path], seed: int = 1) -> int:
    """Write the biased pairs as `train-reward` reads them.

    Args:
        file: the .jsonl file to write.
        seed: of the reviews, and of the rater.
    """
    write_pairs(file, seed)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(pairs, "benchmarks.results.learned"))
