"""The maths of RLHF as pure, typed, differentiable, masked functions."""

from rlhf_lab.functional.advantages import (
    calc_value_function_loss,
    compute_advantages,
    compute_gae,
    compute_returns,
    explained_variance,
    token_rewards,
)
from rlhf_lab.functional.baselines import (
    ADVANTAGES,
    dr_grpo_advantages,
    estimate_advantages,
    grpo_advantages,
    informative_groups,
    opo_advantages,
    prompt_groups,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rewards_to_go,
    rloo_advantages,
    teaching_groups,
    whiten_over_groups,
)
from rlhf_lab.functional.diagnostics import (
    chi_square,
    clip_fraction,
    clip_fraction_high,
    clip_fraction_low,
    effective_sample_size,
    gradient_cosine,
    kept_share,
    masked_importance_weights,
    mean_ratio,
    promoted_mass,
    truncated_importance_weights,
    value_clip_fraction,
)
from rlhf_lab.functional.direct_preference import (
    dpo_loss,
    implicit_rewards,
    kto_loss,
    kto_reference_point,
    log_odds,
    orpo_loss,
    sft_loss,
)
from rlhf_lab.functional.dispatch import call_by_name, check_result, look_up
from rlhf_lab.functional.diversity import (
    WordLogOdds,
    distinct_n,
    ngram_overlap,
    repeated_n,
    word_log_odds,
)
from rlhf_lab.functional.intervals import (
    Interval,
    bootstrap_interval,
    bootstrap_means,
    recovered_fraction,
)
from rlhf_lab.functional.kl import (
    KL_ESTIMATORS,
    calc_kl_penalty,
    calc_sampled_kl_penalty,
    kl_absolute,
    kl_estimate,
    kl_importance_weighted,
    kl_of_later_states,
    kl_per_sequence,
    kl_per_token,
    kl_straight_through,
)
from rlhf_lab.functional.logprobs import (
    LOG_ZERO,
    calc_entropy_bonus,
    entropy_per_token,
    generated_logits,
    generated_values,
    get_logprobs,
    get_max_logprobs,
    log_probs,
    token_logprobs,
)
from rlhf_lab.functional.masks import (
    at_least_float32,
    finished_mask,
    has_stop,
    last_token_mask,
    pad_left,
    pad_right,
    position_ids,
    response_mask,
    truncate_at_stop,
    zero_masked,
)
from rlhf_lab.functional.moments import (
    RunningMoments,
    aggregate,
    aggregation_denominator,
    masked_mean,
    masked_std,
    masked_var,
    scale_rewards,
    sequence_sum,
    whiten,
)
from rlhf_lab.functional.paired import paired_permutation_test, seed_interval, t_two_sided
from rlhf_lab.functional.policy_loss import (
    POLICY_OBJECTIVES,
    calc_clipped_surrogate_objective,
    calc_policy_objective,
    cispo_surrogate,
    gspo_surrogate,
    policy_gradient_objective,
    policy_gradient_surrogate,
    policy_ratio,
    ppo_surrogate,
    sequence_ratio,
)
from rlhf_lab.functional.preference import (
    Calibration,
    auc,
    bradley_terry_loss,
    bradley_terry_token_loss,
    calibration_bins,
    divergence_mask,
    preference_accuracy,
    sample_preferences,
)
from rlhf_lab.functional.rewards import (
    clip_rewards,
    flawed_responses,
    normalize_reward,
    overlong_penalty,
    penalize_responses,
    rewards_over_labels,
)
from rlhf_lab.functional.solve_rates import informative_fraction, pass_at_k, pass_at_k_estimate
from rlhf_lab.functional.tilting import (
    best_of_n_distribution,
    best_of_n_kl_bound,
    best_of_n_mean,
    best_of_n_weights,
    excess_kl,
    tilt,
    tilt_slopes,
)
