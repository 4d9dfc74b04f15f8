"""Record of PPO with the KL penalty in loss or reward, and at other coefficients."""

from typing import Any

from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.probes import ReelTruth
from tools.course.stored_parts import SEEDS, columns, make_record

SETTINGS: dict[str, Any] = {
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
OTHER_COEFFICIENTS = (0.03, 0.1, 1.0, 3.0)
FRESH_REVIEWS = 2048


def evaluate_run(fields: dict[str, Any], seed: int) -> dict[str, float]:
    """Train once; returns reward and KL of fresh reviews, per review and at every slot."""
    settings = SETTINGS | fields | {"seed": seed}
    trained = RLHFTrainer(RLHFArgs(**settings))
    trained.train()
    fresh = RLHFTrainer(
        RLHFArgs(**settings | {"batch_size": FRESH_REVIEWS}),
        policy=trained.policy,
        reference=trained.reference,
    ).rollout_phase()
    slots = ReelTruth().slot_names(fresh.samples.tokens.shape[1])[fresh.samples.prefix_len :]
    by_slot = dict(zip(slots, fresh.kl.mean(0).tolist(), strict=True))
    reward, kl = fresh.raw_rewards.mean().item(), fresh.kl.sum(1).mean().item()
    return {"reward": reward, "KL": kl} | by_slot


PRICES = {str(beta): PLACEMENTS["reward"] | {"kl_coef": beta} for beta in OTHER_COEFFICIENTS}
PARTS = {
    "runs": lambda: columns(lambda x, seed: evaluate_run(PLACEMENTS[x], seed), *PLACEMENTS),
    "prices": lambda: columns(lambda x, seed: evaluate_run(PRICES[x], seed), *PRICES),
}

if __name__ == "__main__":
    heading = {"settings": SETTINGS, "seeds": SEEDS, "fresh_reviews": FRESH_REVIEWS}
    make_record("two_leashes", "two_leashes", PARTS, **heading)
