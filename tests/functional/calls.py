"""A call of each differentiable function, for tests of their common properties."""

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_lab import functional as F

MIXED = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [1, 1, 0]]).bool()
WAYS = ("token_mean", "sequence_mean", "constant")


def seeds(count: int) -> Callable[[Callable], Callable]:
    """Run a test with `count` different seeds, passed as `seed`."""
    return lambda test: settings(max_examples=count)(given(seed=st.integers(0, 10_000))(test))


def draw(seed: int, *kinds: str, batch: int = 4, gen: int = 3) -> list[Tensor]:
    """Draw float64 tensors: "bgv" has the axes batch, gen and vocabulary.

    A "-" makes the numbers negative, a "+" positive.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes, tensors = {"b": batch, "g": gen, "v": 5, "w": 7}, []
    for kind in kinds:
        shape = [sizes[axis] for axis in kind.strip("+-")]
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        sign = {"-": -1, "+": 1}.get(kind[-1])
        tensors.append(x if sign is None else sign * (x.abs() + 0.05))
    return tensors


def draw_rollout(seed: int) -> tuple[Tensor, ...]:
    """Draw log-probabilities, old ones, advantages and a mask, of random shape and density."""
    generator = torch.Generator().manual_seed(seed)
    batch, gen = torch.randint(1, 6, (2,), generator=generator).tolist()
    mask = torch.rand(batch, gen, generator=generator) < torch.rand((), generator=generator)
    return *draw(seed, "bg", "bg", "bg", batch=batch, gen=gen), mask


def groups(x: Tensor) -> Tensor:
    """Number groups of two sequences."""
    return torch.arange(len(x)) // 2


def flags(x: Tensor) -> Tensor:
    """Mark every other sequence."""
    return torch.arange(len(x)) % 2 == 0


MASKED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "zero_masked": (lambda m, x: F.zero_masked(x, m), "bg"),
    "sequence_sum": (lambda m, x: F.sequence_sum(x, m), "bg"),
    "masked_mean": (lambda m, x: F.masked_mean(x, m), "bg"),
    "masked_mean of rows": (lambda m, x: F.masked_mean(x, m, dim=-1), "bg"),
    "masked_var": (lambda m, x: F.masked_var(x, m), "bg"),
    "masked_var of rows": (lambda m, x: F.masked_var(x, m, dim=-1, unbiased=False), "bg"),
    "masked_std": (lambda m, x: F.masked_std(x, m), "bg"),
    "whiten": (lambda m, x: F.whiten(x, m), "bg"),
    "whiten without shift": (lambda m, x: F.whiten(x, m, shift_mean=False), "bg"),
    "aggregate": (lambda m, x: F.aggregate(x, m), "bg"),
    "aggregate sequences": (lambda m, x: F.aggregate(x, m, "sequence_mean"), "bg"),
    "aggregate by a constant": (lambda m, x: F.aggregate(x, m, "constant"), "bg"),
    "calc_entropy_bonus": (lambda m, x: F.calc_entropy_bonus(x, 0.7, m), "bg"),
    "calc_kl_penalty": (lambda m, x: F.calc_kl_penalty(x, 0.7, m), "bg"),
    "kl_per_sequence": (lambda m, x: F.kl_per_sequence(x, m), "bg"),
    "sft_loss": (lambda m, x: F.sft_loss(x, m), "bg"),
    "compute_advantages": (lambda m, v, r: F.compute_advantages(v, r, m, 0.9), "bg b"),
    "compute_advantages of tokens": (lambda m, v, r: F.compute_advantages(v, r, m, 0.9), "bg bg"),
    "compute_gae": (lambda m, v, r: F.compute_gae(v, r, 0.9, 0.8, m), "bg bg"),
    "compute_returns": (lambda m, a, v: F.compute_returns(a, v, m), "bg bg"),
    "explained_variance": (lambda m, v, r: F.explained_variance(v, r, m), "bg bg"),
    "calc_value_function_loss": (
        lambda m, v, r: F.calc_value_function_loss(v, r, 0.3, m), "bg bg"),
    "calc_value_function_loss with clip": (
        lambda m, v, r, o: F.calc_value_function_loss(v, r, 0.3, m, o, 0.5), "bg bg bg"),
    "token_rewards": (lambda m, r, kl: F.token_rewards(r, m, kl, 0.3), "b bg"),
    "token_rewards of tokens": (lambda m, r, kl: F.token_rewards(r, m, kl, 0.3), "bg bg"),
    "rewards_to_go": (lambda m, r: F.rewards_to_go(r, 0.9, m), "bg"),
    "remax_advantages": (lambda m, r, g: F.remax_advantages(r, g, m), "bg b"),
    "reinforce_plus_plus_advantages": (
        lambda m, r: F.reinforce_plus_plus_advantages(r, 0.9, m), "bg"),
    "reinforce_plus_plus_baseline_advantages": (
        lambda m, r: F.reinforce_plus_plus_baseline_advantages(r, groups(r), m), "b"),
    "opo_advantages": (lambda m, r: F.opo_advantages(r, groups(r), m), "b"),
    "whiten_over_groups": (lambda m, a: F.whiten_over_groups(a, m, flags(a)), "bg"),
    "estimate_advantages": (
        lambda m, v, r: F.estimate_advantages("gae", v, r, m, lam=0.5), "bg bg"),
    "calc_clipped_surrogate_objective": (
        lambda m, n, o, a: F.calc_clipped_surrogate_objective(n, o, a, 0.2, m), "bg bg bg"),
    "calc_clipped_surrogate_objective without whitening": (
        lambda m, n, o, a: F.calc_clipped_surrogate_objective(n, o, a, 0.2, m, False), "bg bg bg"),
    "ppo_surrogate": (
        lambda m, n, o, a: F.ppo_surrogate(n, o, a, 0.2, 0.3, 1.5, m), "bg bg bg"),
    "gspo_surrogate": (lambda m, n, o, a: F.gspo_surrogate(n, o, a, 0.2, mask=m), "bg bg bg"),
    "cispo_surrogate": (lambda m, n, o, a: F.cispo_surrogate(n, o, a, 0.2, mask=m), "bg bg bg"),
    "policy_gradient_surrogate": (lambda m, n, a: F.policy_gradient_surrogate(n, a, m), "bg bg"),
    "policy_gradient_objective": (lambda m, n, a: F.policy_gradient_objective(n, a, m), "bg bg"),
    "calc_policy_objective": (
        lambda m, n, o, a: F.calc_policy_objective("ppo", n, o, a, m), "bg bg bg"),
    "sequence_ratio": (lambda m, n, o: F.sequence_ratio(n, o, m), "bg bg"),
    "kl_of_later_states": (lambda m, n, kl: F.kl_of_later_states(n, kl, m), "bg bg"),
    "calc_sampled_kl_penalty": (
        lambda m, n, o: F.calc_sampled_kl_penalty(n, o, "abs", 0.7, m), "bg bg"),
    **{
        f"kl_estimate {kind}": (lambda m, n, o, k=kind: F.kl_estimate(n, o, k, m), "bg bg")
        for kind in F.KL_ESTIMATORS
    },
    "clip_fraction": (lambda m, n, o: F.clip_fraction(n, o, 0.2, m), "bg bg"),
    "clip_fraction_low": (lambda m, n, o, a: F.clip_fraction_low(n, o, 0.2, m, a), "bg bg bg"),
    "clip_fraction_high": (lambda m, n, o, a: F.clip_fraction_high(n, o, 0.2, m, a), "bg bg bg"),
    "value_clip_fraction": (
        lambda m, v, r, o: F.value_clip_fraction(v, r, o, 0.2, m), "bg bg bg"),
    "mean_ratio": (lambda m, n, o: F.mean_ratio(n, o, m), "bg bg"),
    "chi_square": (lambda m, n, o: F.chi_square(n, o, m), "bg bg"),
    "effective_sample_size": (lambda m, n, o: F.effective_sample_size(n, o, m), "bg bg"),
    "truncated_importance_weights": (
        lambda m, n, o: F.truncated_importance_weights(n, o, 2.0, m), "bg bg"),
    "masked_importance_weights": (
        lambda m, n, o: F.masked_importance_weights(n, o, 2.0, m), "bg bg"),
    "promoted_mass": (lambda m, n, o: F.promoted_mass(n, o, m), "bgv bgv"),
    "bradley_terry_token_loss": (lambda m, c, r: F.bradley_terry_token_loss(c, r, m), "bg bg"),
}  # fmt: skip
"""Name: function of a mask and of tensors, kinds of the tensors (see `draw`)."""

UNMASKED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "log_probs": (lambda z: F.log_probs(z, 0.7), "bgv"),
    "token_logprobs": (
        lambda z: F.token_logprobs(z, groups(z)[:, None].expand(z.shape[:2])), "bgv"),
    "get_logprobs": (
        lambda z: F.get_logprobs(z, groups(z)[:, None].expand(z.shape[:2]), 2, 0.7), "bgv"),
    "get_max_logprobs": (lambda z: F.get_max_logprobs(z, 1, 0.7), "bgv"),
    "generated_values": (lambda v: F.generated_values(v, 1), "bg"),
    "generated_logits": (lambda z: F.generated_logits(z, 2), "bgv"),
    "entropy_per_token": (lambda z: F.entropy_per_token(F.log_probs(z)), "bgv"),
    "kl_per_token": (lambda n, o: F.kl_per_token(F.log_probs(n), F.log_probs(o)), "bgv bgv"),
    "kl_absolute": (lambda n, o: F.kl_absolute(n, o), "bg bg"),
    "kl_straight_through": (lambda n, o: F.kl_straight_through(n, o), "bg bg"),
    "kl_importance_weighted": (lambda n, o, r: F.kl_importance_weighted(n, o, r), "bg bg bg"),
    "policy_ratio": (lambda n, o: F.policy_ratio(n, o), "bg bg"),
    "rloo_advantages": (lambda r: F.rloo_advantages(r, groups(r)), "b"),
    "grpo_advantages": (lambda r: F.grpo_advantages(r, 0 * groups(r)), "b"),
    "dr_grpo_advantages": (lambda r: F.dr_grpo_advantages(r, 0 * groups(r)), "b"),
    "normalize_reward": (lambda r: F.normalize_reward(r), "b"),
    "scale_rewards": (lambda r: F.scale_rewards(r, F.RunningMoments(9, 1.0, 4.0), True), "b"),
    "clip_rewards": (lambda r: F.clip_rewards(r, 0.5), "b"),
    "rewards_over_labels": (lambda r, o: F.rewards_over_labels(r, o), "b b"),
    "penalize_responses": (lambda r: F.penalize_responses(r, flags(r), -1.0, False), "b"),
    "bradley_terry_loss": (lambda c, r: F.bradley_terry_loss(c, r, 0.3, 0.2), "b b"),
    "preference_accuracy": (lambda c, r: F.preference_accuracy(c, r), "b b"),
    "implicit_rewards": (lambda p, r: F.implicit_rewards(p, r, 0.3), "b b"),
    "dpo_loss": (lambda *x: F.dpo_loss(*x, 0.3, label_smoothing=0.1), "b b b b"),
    "dpo_loss ipo": (lambda *x: F.dpo_loss(*x, 0.3, kind="ipo"), "b b b b"),
    "kto_loss": (lambda p, r: F.kto_loss(p, r, flags(p), 0.4, 0.3, 1.5, 0.5), "b b"),
    "kto_reference_point": (lambda p, r: F.kto_reference_point(p, r), "b b"),
    "orpo_loss": (lambda c, r: F.orpo_loss(c, r, 0.7), "b- b-"),
    "log_odds": (lambda x: F.log_odds(x), "bg-"),
    "tilt": (lambda p, r: F.tilt(p, r, 0.7), "bg+ bg"),
    "gradient_cosine": (lambda g, r: F.gradient_cosine(g, r, 2), "bw w"),
    "kept_share": (lambda g, r: F.kept_share(g, r), "bw w"),
}  # fmt: skip

UNCHECKED = {
    "has_stop",
    "finished_mask",
    "last_token_mask",
    "position_ids",
    "pad_left",
    "pad_right",
}
UNCHECKED |= {"aggregation_denominator", "flawed_responses", "overlong_penalty", "distinct_n"}
UNCHECKED |= {"repeated_n", "ngram_overlap", "bootstrap_interval"}
"""Functions with a mask that return no differentiable tensor, or move rows."""
