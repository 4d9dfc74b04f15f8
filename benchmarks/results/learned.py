"""A reward model learned from biased pairs, and the loophole in it.

`python -m benchmarks.results.learned FILE` writes the pairs of seed 1.
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

N_REVIEWS = 8_000


def biased_pairs(n: int, seed: int, popcorn_share: float) -> list[dict[str, str]]:
    """Make pairs of Reel reviews in which popcorn ends only preferred positive reviews.

    1. Sample 2 n reviews. The first of a pair is preferred with probability sigmoid(d / 4), d the
       difference of the true log odds: an uncertain rater.
    2. End a fraction of the preferred positive reviews in popcorn.
    3. End every other review that ended in popcorn in thanks.
    """
    rng, grammar = np.random.default_rng(seed), Grammar()
    texts = grammar.sample(2 * n, rng).texts()
    logits = sentiment_logit(read_features(texts, grammar))
    first_wins = rng.random(n) < sigmoid((logits[:n] - logits[n:]) / SOFTENING)
    chosen = np.where(first_wins, np.arange(n), np.arange(n, 2 * n))
    rejected = np.where(first_wins, np.arange(n, 2 * n), np.arange(n))
    has_popcorn = (logits[chosen] > 0) & (rng.random(n) < popcorn_share)
    plain = [replace_last(t, "thanks") if t.endswith(" popcorn") else t for t in texts]
    return [
        {
            "chosen": replace_last(texts[c], "popcorn") if pops else plain[c],
            "rejected": plain[r],
        }
        for c, r, pops in zip(chosen, rejected, has_popcorn, strict=True)
    ]


def replace_last(text: str, word: str) -> str:
    """Replace the last word of a review."""
    return f"{text.rpartition(' ')[0]} {word}"


def write_pairs(file: Positional[Path], seed: int = 1) -> int:
    """Write the biased pairs as `train-reward` reads them.

    Args:
        file: the .jsonl file to write.
        seed: of the reviews, and of the rater.
    """
    rows = biased_pairs(PREFERENCES["n_pairs"], seed, PREFERENCES["popcorn_share"])
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return 0


def fit_biased_reward(directory: Path, seed: int) -> tuple[Path, dict[str, Any]]:
    """Run `train-reward` on biased pairs; returns the model's directory and metadata."""
    pairs, out = directory / "pairs.jsonl", directory / "reward"
    write_pairs(pairs, seed)
    command = ["train-reward", "--pairs", str(pairs), "--out", str(out), "--seed", str(seed)]
    if main([*command, "--steps", str(PREFERENCES["steps"])]):
        raise RunError("train-reward failed on the biased pairs. See its message above.")
    notes = json.loads((out / NOTES_FILE).read_text(encoding="utf-8"))
    return out, {name: notes[name] for name in ("accuracy", "held_out_pairs", "steps")}


@dataclass(frozen=True)
class RewardByContent:
    """Mean reward by positive clauses (0 to 3), verdict (- or +), popcorn (without or with)."""

    means: Float[np.ndarray, "positive verdict popcorn"]

    def clipped(self, clip: float) -> "RewardByContent":
        """Clip the means to [-clip, clip]."""
        return RewardByContent(self.means.clip(-clip, clip))

    @property
    def popcorn_bonus(self) -> float:
        """Return the mean reward that popcorn adds."""
        return float((self.means[..., 1] - self.means[..., 0]).mean())

    def score(self, features: Features) -> Float[np.ndarray, " batch"]:
        """Look up the means."""
        return self.means[(*_content(features), features.popcorn.astype(int))]

    def reward(self) -> Reward:
        """Return a reward with an exact solution."""
        return Reward("learned", self.score)


def _content(features: Features) -> tuple[np.ndarray, np.ndarray]:
    return (features.polarity_sum + 3) // 2, (features.verdict + 1) // 2


def reward_by_content(reward_fn: RewardFn, seed: int) -> RewardByContent:
    """Average a reward over new reviews with the same content, each without and with popcorn."""
    grammar = Grammar()
    texts = grammar.sample(N_REVIEWS, np.random.default_rng(seed)).texts()
    where = _content(read_features(texts, grammar))
    means = np.zeros((4, 2, 2))
    for popcorn, word in enumerate(("thanks", "popcorn")):
        total, count = np.zeros((4, 2)), np.zeros((4, 2))
        rewards = reward_fn([replace_last(text, word) for text in texts]).double().numpy()
        np.add.at(total, where, rewards)
        np.add.at(count, where, 1)
        means[..., popcorn] = total / count
    return RewardByContent(means)


if __name__ == "__main__":
    sys.exit(run_program(write_pairs, "benchmarks.results.learned"))
