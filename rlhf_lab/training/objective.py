"""The objective's four terms with a run's settings bound to them, once and not per minibatch."""

import copy
from collections.abc import Callable
from typing import Any

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
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.samples import Samples
from rlhf_lab.training.overrides import Overrides
from rlhf_lab.training.replay import ReplayMinibatch

IMPORTANCE_CAP = 2.0  # of the importance ratios between trainer and engine; verl's default


class Objective:
    """The four terms of the objective as a run asks for them.

    Args:
        args: the settings.
        functions: the caller's own functions, or the package's.
        forward: how the models are run; as the settings say when None.

    Attributes:
        clipped_surrogate, value_loss: called as those of `Overrides`. The first is the policy's
            objective; for the plain settings, the very function of these.
        kl_estimator: what estimates the KL from sampled tokens; None where it is the exact one.
    """

    def __init__(
        self, args: RLHFArgs, functions: Overrides | None = None, forward: Forward | None = None
    ) -> None:
        self.args = args
        self.functions = functions = functions or Overrides()
        self.forward = forward or Forward.from_args(args)
        self.clip_coef, self.normalize = args.clip_coef, args.normalize_advantages
        self.vf_coef, self.vf_clip = args.vf_coef, args.vf_clip
        self.clipped_surrogate = policy_objective(args, functions)
        self.value_loss = functions.value_loss
        self.kl_estimator = functions.sampled_kl(args)
        self.penalizes_exact_kl = args.kl_in == "loss" and self.kl_estimator is None

    def of_a_part(self) -> "Objective":
        """The same for a part of a minibatch, whose advantages are whitened already."""
        part = copy.copy(self)
        part.normalize = False
        return part

    def surrogate(
        self, logprobs: Float[Tensor, "minibatch gen"], minibatch: ReplayMinibatch
    ) -> Any:
        """The policy's objective on a minibatch, whichever `args.policy_loss` names.

        With `normalize_advantages` it whitens the advantages itself; where answers to one prompt
        are compared they come whitened over the groups that teach (see `whiten_over_groups`).
        """
        advantages, normalize = minibatch.advantages, self.normalize
        if normalize and minibatch.teaching is not None:
            advantages, normalize = minibatch.whitened_advantages(), False
        weights = importance_weights(minibatch, self.args)
        if weights is not None:
            advantages = minibatch.whitened_advantages() if normalize else advantages
            advantages, normalize = weights * advantages, False
        known = logprobs, minibatch.logprobs, advantages
        return self.clipped_surrogate(*known, self.clip_coef, minibatch.mask, normalize)

    def entropy_bonus(self, out: PolicyOutputs, mask: Bool[Tensor, "minibatch gen"]) -> Any:
        """`ent_coef` times the mean entropy of the generated tokens."""
        return self.functions.entropy_bonus(out.entropy, self.args.ent_coef, mask)

    def kl_penalty(
        self, out: PolicyOutputs, minibatch: ReplayMinibatch, kl_coef: float | None = None
    ) -> Any:
        """`kl_coef` times the mean KL: exact, estimated, or 0 where the rewards have paid for it.

        Raises:
            ConfigError: the KL is to be estimated, and the rollout has no ref_logprobs.
        """
        kl_coef = self.args.kl_coef if kl_coef is None else kl_coef
        if self.penalizes_exact_kl:
            return self.functions.kl_penalty(out.kl, kl_coef, minibatch.mask)
        if self.args.kl_in == "reward":
            return out.logprobs.new_zeros(())
        if minibatch.ref_logprobs is None:
            raise ConfigError(
                f"kl_estimator={self.args.kl_estimator!r} needs the rollout's ref_logprobs, which "
                "are missing; make the rollout with the trainer's own rollout_phase."
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
        """The reference's log-probabilities of the samples, if the KL is estimated from them."""
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
        """The KL of each token that its reward pays for; None where the loss pays."""
        if self.args.kl_in == "loss":
            return None
        if self.kl_estimator is None:
            return exact
        return F.kl_estimate(samples.logprobs, ref_logprobs, self.kl_estimator, samples.mask)


def run_policy_on(
    minibatch: ReplayMinibatch,
    policy: TransformerWithValueHead,
    reference: HookedModel,
    objective: Objective,
) -> PolicyOutputs:
    """`run_policy` on a minibatch, for what an objective wants to know of it."""
    return run_policy(
        policy,
        minibatch.tokens,
        minibatch.prefix_len,
        objective.args.temperature,
        attention_mask=minibatch.attention_mask if minibatch.padded else None,
        support=minibatch.support,
        reference=reference if objective.penalizes_exact_kl else None,
        ref_residuals=minibatch.ref_residuals,
        forward=objective.forward,
        logprobs=objective.functions.logprobs,
    )


PolicyObjective = Callable[..., Float[Tensor, ""]]


def policy_objective(args: RLHFArgs, functions: Overrides) -> PolicyObjective:
    """The policy's objective of a run: `clipped_surrogate`, or the one chosen in its place.

    Called as `calc_clipped_surrogate_objective` is, whichever it is.

    1. Limit the log-ratios to `args.max_log_ratio`, if that is set.
    2. Let the chosen function give each token its part, and aggregate as `args.loss_aggregation`
       says.
    """
    is_plain = functions.clips_plainly(args)
    if is_plain and args.max_log_ratio is None:
        return functions.clipped_surrogate

    def chosen(
        logprobs: Float[Tensor, "minibatch gen"],
        old_logprobs: Float[Tensor, "minibatch gen"],
        advantages: Float[Tensor, "minibatch gen"],
        clip_coef: float,
        mask: Bool[Tensor, "minibatch gen"],
        normalize: bool,
    ) -> Float[Tensor, ""]:
        known = limit_log_ratio(logprobs, old_logprobs, args), old_logprobs, advantages
        if is_plain:
            return functions.clipped_surrogate(*known, clip_coef, mask, normalize)
        return F.calc_policy_objective(
            functions.policy_loss or args.policy_loss,
            *known,
            mask,
            clip_coef=clip_coef,
            clip_coef_high=args.clip_coef_high,
            dual_clip=args.dual_clip,
            normalize=normalize,
            aggregation=args.loss_aggregation,
            denominator=F.aggregation_denominator(mask, args.loss_aggregation, args.gen_len),
        )

    return chosen


def limit_log_ratio(
    logprobs: Float[Tensor, "minibatch gen"], old: Float[Tensor, "minibatch gen"], args: RLHFArgs
) -> Float[Tensor, "minibatch gen"]:
    """Log-probabilities whose distance from the old ones is at most `args.max_log_ratio`."""
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
    """What each token adds to the policy's objective with the package's functions; they sum to it.

    1. Take what the chosen loss gives each token.
    2. Multiply by its weight in the aggregation: one over the number of real tokens, over the
       number of responses and the token's own response, or over responses times gen_len.
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
