"""The maths of RLHF as pure, typed, differentiable, masked functions."""

from rlhf_lab.functional.advantages import (
    compute_advantages,
    compute_gae,
    compute_returns,
    explained_variance,
    grpo_advantages,
    one_step_advantages,
    rloo_advantages,
    token_rewards,
)
from rlhf_lab.functional.baselines import (
    dr_grpo_advantages,
    informative_groups,
    opo_advantages,
    prompt_groups,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rewards_to_go,
)
from rlhf_lab.functional.entropy import calc_entropy_bonus, entropy_per_token
from rlhf_lab.functional.kl import calc_kl_penalty, kl_estimate, kl_per_sequence, kl_per_token
from rlhf_lab.functional.logprobs import generated_logits, generated_values, get_logprobs
from rlhf_lab.functional.masks import (
    at_least_float32,
    finished_mask,
    has_stop,
    last_real_token,
    last_token_mask,
    masked_mean,
    masked_std,
    masked_var,
    response_mask,
    sequence_sum,
    truncate_at_stop,
    whiten,
    zero_masked,
)
from rlhf_lab.functional.padding import pad_left, pad_right, position_ids
from rlhf_lab.functional.policy_loss import (
    calc_clipped_surrogate_objective,
    clip_fraction,
    policy_ratio,
)
from rlhf_lab.functional.preference import bradley_terry_loss, dpo_loss
from rlhf_lab.functional.registry import (
    ADVANTAGES,
    call_by_name,
    estimate_advantages,
    look_up,
    needs,
)
from rlhf_lab.functional.rewards import normalize_reward
from rlhf_lab.functional.token_stats import Readout, TokenStats, token_stats_chunked
from rlhf_lab.functional.value_loss import calc_value_function_loss

__all__ = [
    "ADVANTAGES",
    "Readout",
    "TokenStats",
    "at_least_float32",
    "bradley_terry_loss",
    "calc_clipped_surrogate_objective",
    "calc_entropy_bonus",
    "calc_kl_penalty",
    "calc_value_function_loss",
    "call_by_name",
    "clip_fraction",
    "compute_advantages",
    "compute_gae",
    "compute_returns",
    "dpo_loss",
    "dr_grpo_advantages",
    "entropy_per_token",
    "estimate_advantages",
    "explained_variance",
    "finished_mask",
    "generated_logits",
    "generated_values",
    "get_logprobs",
    "grpo_advantages",
    "has_stop",
    "informative_groups",
    "kl_estimate",
    "kl_per_sequence",
    "kl_per_token",
    "last_real_token",
    "last_token_mask",
    "look_up",
    "masked_mean",
    "masked_std",
    "masked_var",
    "needs",
    "normalize_reward",
    "one_step_advantages",
    "opo_advantages",
    "pad_left",
    "pad_right",
    "policy_ratio",
    "position_ids",
    "prompt_groups",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "remax_advantages",
    "response_mask",
    "rewards_to_go",
    "rloo_advantages",
    "sequence_sum",
    "token_rewards",
    "token_stats_chunked",
    "truncate_at_stop",
    "whiten",
    "zero_masked",
]
