"""Record of a claim: the reward after eight phases with GAE's lambda 0.5 and 1, five seeds."""

from rlhf_lab import RLHFArgs, RLHFTrainer
from tools.course.stored_parts import RUN_SETTINGS, make_record

SEEDS = (1, 2, 3, 4, 5)


def last_rewards(gae_lambda: float) -> list[float]:
    """Train once per seed; returns the mean reward of each last phase."""
    fields = RUN_SETTINGS | {"total_phases": 8, "kl_coef": 0.3, "gae_lambda": gae_lambda}
    runs = (RLHFTrainer(RLHFArgs(**fields, seed=seed)) for seed in SEEDS)
    return [run.train()[-1].mean_reward for run in runs]


if __name__ == "__main__":
    parts = {"treated": lambda: last_rewards(0.5), "control": lambda: last_rewards(1.0)}
    make_record("claim_runs", "claim_runs", parts, 4, seeds=SEEDS)
