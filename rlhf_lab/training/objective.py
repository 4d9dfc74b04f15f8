"""The objective's four terms with a run's settings bound to them."""

import copy
from collections.abc import Callable

from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import (
    Forward,
    PolicyOutputs,
    TransformerWithValueHead,
    reference_logprobs,
    run_policy,
)
from rlhf_lab.models.device import LOGPROB_ROUNDING
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.samples import Samples
from rlhf_lab.training.overrides import Overrides
from rlhf_lab.training.replay import ReplayMinibatch

IMPORTANCE_CAP = 2.0  # of the importance ratios between trainer and engine; verl's default


class Objective:
    """The terms of the objective for the settings of a run; `ppo.objective_terms` adds them.

    Args:
        args: the settings.
        overrides: custom functions, or the package's.
        forward: how the models are run; from the settings if None.

    Attributes:
        clipped_surrogate: policy objective, called like `calc_clipped_surrogate_objective`.
        kl_estimator: estimates the KL from sampled tokens; None for the exact KL.
        normalize: True if `surrogate` whitens the advantages.
        is_custom: True if a function is not the package's.
        rounding: largest error of a probability ratio that precision explains.
    """

    def __init__(
        self, args: RLHFArgs, overrides: Overrides | None = None, forward: Forward | None = None
    ) -> None:
        self.args = args
        self.overrides = Overrides() if overrides is None else overrides
        self.is_custom = self.overrides != Overrides()
        self.forward = forward or Forward.from_args(args)
        self.normalize = args.normalize_advantages
        self.rounding = LOGPROB_ROUNDING[args.rounding]
        self.clipped_surrogate = policy_objective(args, self.overrides)
        self.kl_estimator = self.overrides.sampled_kl(args)
        self.penalizes_exact_kl = args.kl_in == "loss" and self.kl_estimator is None

    def without_whitening(self) -> "Objective":
        """Return the same objective for advantages that are whitened already."""
        part = copy.copy(self)
        part.normalize = False
        return part

    def run_policy(
        self,
        minibatch: ReplayMinibatch,
        policy: TransformerWithValueHead,
        reference: HookedModel,
    ) -> PolicyOutputs:
        """Run the policy on a minibatch, and compare with the reference if the KL is exact."""
        return run_policy(
            policy,
            minibatch.tokens,
            minibatch.prefix_len,
            self.args.temperature,
            attention_mask=minibatch.attention_mask if minibatch.padded else None,
            support=minibatch.support,
            reference=reference if self.penalizes_exact_kl else None,
            ref_residuals=minibatch.ref_residuals,
            forward=self.forward,
            logprobs=self.overrides.logprobs,
        )

    def surrogate(
        self, logprobs: Float[Tensor, "minibatch gen"], minibatch: ReplayMinibatch
    ) -> Float[Tensor, ""]:
        """Compute the policy objective that `args.policy_loss` names.

        With `normalize_advantages` the function whitens the advantages itself; those of compared
        responses are whitened here, over informative groups (see `whiten_over_groups`).
        """
        advantages, normalize = minibatch.advantages, self.normalize
        if normalize and minibatch.teaching is not None:
            advantages, normalize = minibatch.whitened_advantages(), False
        if self.args.importance_correction != "none" and minibatch.engine_logprobs is not None:
            advantages = minibatch.whitened_advantages() if normalize else advantages
            advantages = importance_weights(minibatch, self.args) * advantages
            normalize = False
        known = logprobs, minibatch.logprobs, advantages
        return self.clipped_surrogate(*known, self.args.clip_coef, minibatch.mask, normalize)

    def kl_penalty(
        self, out: PolicyOutputs, minibatch: ReplayMinibatch, kl_coef: float | None = None
    ) -> Float[Tensor, ""]:
        """Compute `kl_coef` times the mean KL, exact or estimated; 0 if it is in the rewards."""
        kl_coef = self.args.kl_coef if kl_coef is None else kl_coef
        if self.penalizes_exact_kl:
            return self.overrides.kl_penalty(out.kl, kl_coef, minibatch.mask)
        if self.args.kl_in == "reward":
            return out.logprobs.new_zeros(())
        if minibatch.ref_logprobs is None:
            raise ConfigError(
                f"kl_estimator={self.args.kl_estimator!r} requires the rollout's ref_logprobs. "
                "Make the rollout with the trainer's rollout_phase."
            )
        return F.calc_sampled_kl_penalty(
            out.logprobs, minibatch.ref_logprobs, self.kl_estimator, kl_coef, minibatch.mask
        )

    def reference_logprobs(
        self,
        reference: HookedModel,
        samples: Samples,
        ref_residuals: Float[Tensor, "batch gen d_model"],
    ) -> Float[Tensor, "batch gen"] | None:
        """Compute the reference's log-probabilities of samples; None if the KL is exact."""
        if self.kl_estimator is None:
            return None
        at_once = self.args.temperature, self.args.rows_at_once
        return reference_logprobs(reference, samples, ref_residuals, *at_once, self.forward)

    def kl_in_reward(
        self,
        samples: Samples,
        exact: Float[Tensor, "batch gen"],
        ref_logprobs: Float[Tensor, "batch gen"] | None,
    ) -> Float[Tensor, "batch gen"] | None:
        """Return the KL to subtract from each token's reward; None if the loss has the KL."""
        if self.args.kl_in == "loss":
            return None
        if self.kl_estimator is None:
            return exact
        return F.kl_estimate(samples.logprobs, ref_logprobs, self.kl_estimator, samples.mask)


def policy_objective(args: RLHFArgs, overrides: Overrides) -> Callable[..., Float[Tensor, ""]]:
    """Return the policy objective of a run, called like `calc_clipped_surrogate_objective`.

    1. Limit the log-ratios to `args.max_log_ratio`, if that is set.
    2. Compute each token's part with the chosen function, and aggregate by `loss_aggregation`.
    """
    is_plain = overrides.clips_plainly(args)
    if is_plain and args.max_log_ratio is None:
        return overrides.clipped_surrogate

    def compute(
        logprobs: Float[Tensor, "minibatch gen"],
        old_logprobs: Float[Tensor, "minibatch gen"],
        advantages: Float[Tensor, "minibatch gen"],
        clip_coef: float,
        mask: Bool[Tensor, "minibatch gen"],
        normalize: bool,
    ) -> Float[Tensor, ""]:
        known = limit_log_ratio(logprobs, old_logprobs, args), old_logprobs, advantages
        if is_plain:
            return overrides.clipped_surrogate(*known, clip_coef, mask, normalize)
        return F.calc_policy_objective(
            overrides.policy_loss or args.policy_loss,
            *known,
            mask,
            clip_coef=clip_coef,
            clip_coef_high=args.clip_coef_high,
            dual_clip=args.dual_clip,
            normalize=normalize,
            aggregation=args.loss_aggregation,
            denominator=F.aggregation_denominator(mask, args.loss_aggregation, args.gen_len),
        )

    return compute


def limit_log_ratio(
    logprobs: Float[Tensor, "minibatch gen"], old: Float[Tensor, "minibatch gen"], args: RLHFArgs
) -> Float[Tensor, "minibatch gen"]:
    """Move log-probabilities to at most `args.max_log_ratio` from the old ones."""
    if args.max_log_ratio is None:
        return logprobs
    return old + (logprobs - old).clamp(-args.max_log_ratio, args.max_log_ratio)


def importance_weights(
    minibatch: ReplayMinibatch, args: RLHFArgs
) -> Float[Tensor, "minibatch gen"] | None:
    """Return the weight of each token for a sampler that is not the policy; None without one.

    Every policy objective is linear in the advantages for weights >= 0, so they are multiplied.
    """
    if args.importance_correction == "none" or minibatch.engine_logprobs is None:
        return None
    is_masked = args.importance_correction == "masked"
    weigh = F.masked_importance_weights if is_masked else F.truncated_importance_weights
    logprobs, mask = minibatch.logprobs, minibatch.mask
    return weigh(logprobs, minibatch.engine_logprobs, IMPORTANCE_CAP, mask)


def surrogate_per_token(
    logprobs: Float[Tensor, "minibatch gen"], minibatch: ReplayMinibatch, args: RLHFArgs
) -> Float[Tensor, "minibatch gen"]:
    """Compute what each token adds to the policy objective, by the package's functions.

    1. Compute the chosen loss of each token.
    2. Multiply by its weight in the aggregation: one over the number of real tokens, over the
       number of responses and the token's response, or over responses times gen_len.
    """
    old, advantages, mask = minibatch.logprobs, minibatch.advantages, minibatch.mask
    advantages = minibatch.whitened_advantages() if args.normalize_advantages else advantages
    weights = importance_weights(minibatch, args)
    given = {
        "logprobs": limit_log_ratio(logprobs, old, args),
        "old_logprobs": old,
        "advantages": advantages if weights is None else weights * advantages,
        "mask": mask,
        "clip_coef": args.clip_coef,
        "clip_coef_high": args.clip_coef_high,
        "dual_clip": args.dual_clip,
    }
    loss = F.look_up(args.policy_loss, F.POLICY_OBJECTIVES, "policy_loss")
    per_token = F.call_by_name(loss, given, "policy_loss")
    weight = 1 / F.aggregation_denominator(mask, args.loss_aggregation, args.gen_len)
    if args.loss_aggregation == "sequence_mean":
        weight = weight / mask.sum(1, keepdim=True).clamp(min=1)
    return F.zero_masked(per_token * weight, mask)
