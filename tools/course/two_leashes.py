"""The maker of lesson 04's record: PPO with the KL in loss or reward, and at other prices."""

import sys
from pathlib import Path
from typing import Any

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.probes import ReelTruth
from tools.course.stored_parts import write_parts

RECORD = Path("rlhf_lab", "course", "records", "two_leashes.json")
LEASH_SEEDS = (1, 2, 3)
LEASH_SETTINGS: dict[str, Any] = {
    "preset": "reel",
    "reward_fn": "true_reward",
    "total_phases": 40,
    "batch_size": 256,
    "gen_len": 26,
    "top_k": None,
    "advantages": "gae",
    "gae_lambda": 1.0,
    "normalize_reward": False,
    "normalize_advantages": False,
    "kl_coef": 0.3,
}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "loss": {"kl_in": "loss"},
    "reward": {"kl_in": "reward", "kl_estimator": "k1"},
}
PRICES = (0.03, 0.1, 1.0, 3.0)
"""Of a nat, besides that of LEASH_SETTINGS."""
FRESH = 2048
"""Reviews that the trained policy is judged on."""


def leash_figures(fields: dict[str, Any], seed: int) -> dict[str, float]:
    """Train once; reward and KL of fresh reviews, per review and at every slot."""
    settings = LEASH_SETTINGS | fields | {"seed": seed}
    trained = RLHFTrainer(RLHFArgs(**settings))
    trained.train()
    judged = RLHFTrainer(
        RLHFArgs(**settings | {"batch_size": FRESH}),
        policy=trained.policy,
        reference=trained.reference,
    ).rollout_phase()
    slots = ReelTruth().slot_names(judged.samples.tokens.shape[1])[judged.samples.prefix_len :]
    by_slot = dict(zip(slots, judged.kl.mean(0).tolist(), strict=True))
    return {
        "reward": judged.raw_rewards.mean().item(),
        "KL": judged.kl.sum(1).mean().item(),
    } | by_slot


def over_seeds(fields: dict[str, Any]) -> dict[str, list[float]]:
    """The figures of one run per seed, by name."""
    every = [leash_figures(fields, seed) for seed in LEASH_SEEDS]
    return {key: [one[key] for one in every] for key in every[0]}


def placement_runs() -> dict[str, dict[str, list[float]]]:
    """The KL in the loss and in the reward, at one price."""
    return {name: over_seeds(fields) for name, fields in PLACEMENTS.items()}


def price_runs() -> dict[str, dict[str, list[float]]]:
    """The KL in the reward, at other prices."""
    return {str(beta): over_seeds(PLACEMENTS["reward"] | {"kl_coef": beta}) for beta in PRICES}


def make_leashes(path: Path, parts: list[str]) -> None:
    """Make some parts of the record anew, as `write_parts` does, rounded to 5 digits."""
    heading = {
        "made_by": "python -m tools.course.two_leashes",
        "settings": LEASH_SETTINGS,
        "seeds": LEASH_SEEDS,
        "fresh_reviews": FRESH,
    }
    write_parts(path, heading, {"runs": placement_runs, "prices": price_runs}, parts, digits=5)


if __name__ == "__main__":
    sys.exit(make_leashes(RECORD, sys.argv[1:]))
