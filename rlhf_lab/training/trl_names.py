"""A phase's numbers under the names that TRL's PPOTrainer (0.7 to 0.11) gave to its statistics."""

from rlhf_lab.config import RLHFArgs
from rlhf_lab.training.report import PhaseReport


def trl_stats(report: PhaseReport, args: RLHFArgs) -> dict[str, float]:
    """What TRL's `step` returned, as far as it is known here.

    Where the numbers differ: `objective/kl` is exact, nats per sequence (TRL: k1);
    `ppo/policy/approxkl` is k3 (TRL: k2); `ppo/loss/total` is minus the objective, entropy bonus
    and KL penalty included.
    """
    value_weight = args.vf_coef or 1.0
    return {
        "objective/kl": report.kl_per_sequence,
        "objective/kl_coef": report.kl_coef,
        "ppo/mean_scores": report.mean_reward,
        "ppo/std_scores": report.reward_std,
        "ppo/loss/policy": -report.clipped_surrogate,
        "ppo/loss/value": report.value_loss / value_weight,
        "ppo/loss/total": -report.objective,
        "ppo/policy/approxkl": report.approx_kl_per_token,
        "ppo/policy/clipfrac": report.clip_fraction,
        "ppo/policy/entropy": report.entropy_per_token,
        "ppo/val/var_explained": report.explained_variance,
        "ppo/learning_rate": report.base_lr,
        "tokens/responses_len_mean": report.response_length,
        "time/ppo/total": report.rollout_seconds + report.learning_seconds,
    }
