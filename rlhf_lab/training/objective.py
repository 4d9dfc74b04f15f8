"""The objective's four terms with a run's settings bound to them."""

from jaxtyping import Bool, Float
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import Forward, TransformerWithValueHead, run_policy
from rlhf_lab.models.device import LOGPROB_ROUNDING
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.models.outputs import PolicyOutputs, reference_logprobs
from rlhf_lab.samples import Samples
from rlhf_lab.training.overrides import Overrides
from rlhf_lab.training.rollout import ReplayMinibatch

MinibatchTokens = Float[Tensor, "minibatch gen"]
IMPORTANCE_CAP = 2.0  # of the importance ratios between trainer and engine; verl's default


class Objective:
    """The terms of the objective for the settings of a run; `ppo.objective_terms` adds them.

    Args:
        args: the settings.
        overrides: custom functions, or the package's.
        forward: how the models are run; from the settings if None.

    Attributes:
        clips_plainly: True if the policy objective is `overrides.clipped_surrogate`.
        kl_estimator: estimates the KL from sampled tokens; None for the exact KL.
        average_kl: aggregation of the KL in the loss.
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
        plain = "ppo", "token_mean", None, None
        chosen = args.policy_loss, args.loss_aggregation, args.clip_coef_high, args.dual_clip
        self.clips_plainly = self.overrides.policy_loss is None and chosen == plain
        name = None if args.kl_estimator == "exact" else args.kl_estimator
        self.kl_estimator = self.overrides.kl_estimator or name
        self.penalizes_exact_kl = args.kl_in == "loss" and self.kl_estimator is None
        self.average_kl = "token_mean" if self.kl_estimator is None else args.loss_aggregation
        self._validate_called()

    def _validate_called(self) -> None:
        custom = self.overrides
        is_custom = custom.clipped_surrogate is not Overrides.clipped_surrogate
        if is_custom and not self.clips_plainly:
            raise ConfigError(
                "clipped_surrogate is called for the plain policy_loss='ppo' only. Leave "
                "policy_loss, clip_coef_high, dual_clip and loss_aggregation at their defaults, or "
                "pass the function as policy_loss."
            )
        is_custom = custom.normalize_reward is not Overrides.normalize_reward
        if is_custom and not self.args.normalize_reward:
            raise ConfigError("normalize_reward is not called. Set normalize_reward=True in args.")
        if custom.kl_penalty is not Overrides.kl_penalty and not self.penalizes_exact_kl:
            raise ConfigError(
                "kl_penalty is called for kl_in='loss' with kl_estimator='exact' only. Set them, "
                "or pass the function as kl_estimator."
            )

    def run_policy(
        self, minibatch: ReplayMinibatch, policy: TransformerWithValueHead, reference: HookedModel
    ) -> PolicyOutputs:
        """Run the policy on a minibatch, and compare with the reference if the KL is exact."""
        return run_policy(
            policy,
            minibatch.tokens,
            minibatch.tokens.shape[1] - minibatch.mask.shape[1],
            self.args.temperature,
            attention_mask=minibatch.attention_mask if minibatch.padded else None,
            support=minibatch.support,
            reference=reference if self.penalizes_exact_kl else None,
            ref_residuals=minibatch.ref_residuals,
            forward=self.forward,
            logprobs=self.overrides.logprobs,
        )

    def surrogate(self, logprobs: MinibatchTokens, minibatch: ReplayMinibatch) -> Float[Tensor, ""]:
        """Compute the policy objective that `args.policy_loss` names.

        1. Whiten the advantages over informative groups, and multiply them by importance weights.
           Otherwise the function whitens the advantages itself (`normalize_advantages`).
        2. Limit the log-ratios to `args.max_log_ratio`, if that is set.
        3. Compute each token's part with the chosen function, and aggregate by `loss_aggregation`.
        """
        advantages, normalize = minibatch.advantages, self.normalize
        is_engine = minibatch.engine_logprobs is not None
        weights = importance_weights(minibatch, self.args) if is_engine else None
        if normalize and (minibatch.teaching is not None or weights is not None):
            advantages, normalize = minibatch.whitened_advantages(), False
        if weights is not None:
            advantages = weights * advantages
        args, old, mask = self.args, minibatch.logprobs, minibatch.mask
        if args.max_log_ratio is not None:
            logprobs = old + (logprobs - old).clamp(-args.max_log_ratio, args.max_log_ratio)
        if self.clips_plainly:
            inputs = logprobs, old, advantages, args.clip_coef, mask, normalize
            return self.overrides.clipped_surrogate(*inputs)
        return F.calc_policy_objective(
            self.overrides.policy_loss or args.policy_loss,
            *(logprobs, old, advantages, mask),
            clip_coef=args.clip_coef,
            clip_coef_high=args.clip_coef_high,
            dual_clip=args.dual_clip,
            normalize=normalize,
            aggregation=args.loss_aggregation,
            denominator=F.aggregation_denominator(mask, args.loss_aggregation, args.gen_len),
        )

    def kl_penalty(
        self,
        out: PolicyOutputs,
        minibatch: ReplayMinibatch,
        kl_coef: float | Float[Tensor, ""] | None = None,
    ) -> Float[Tensor, ""]:
        """Compute `kl_coef` times the mean KL; 0 if the rewards have the KL.

        The exact KL is averaged over tokens; an estimate by `loss_aggregation`, as the surrogate.
        """
        if isinstance(kl_coef, Tensor):  # on the device, for a CUDA graph
            return kl_coef * self.kl_penalty(out, minibatch, 1.0)
        kl_coef = self.args.kl_coef if kl_coef is None else kl_coef
        if self.penalizes_exact_kl:
            return self.overrides.kl_penalty(out.kl, kl_coef, minibatch.mask)
        if self.args.kl_in == "reward":
            return out.logprobs.new_zeros(())
        mask, how = minibatch.mask, self.average_kl
        total = F.aggregation_denominator(mask, how, self.args.gen_len)
        inputs = out.logprobs, minibatch.ref_logprobs, self.kl_estimator, kl_coef, mask
        return F.calc_sampled_kl_penalty(*inputs, aggregation=how, denominator=total)

    def reference_logprobs(
        self,
        reference: HookedModel,
        samples: Samples,
        ref_residuals: Float[Tensor, "batch gen d_model"],
    ) -> Float[Tensor, "batch gen"] | None:
        """Compute the reference's log-probabilities of samples; None if the KL is exact."""
        if self.kl_estimator is None:
            return None
        settings = self.args.temperature, self.args.rows_at_once, self.forward
        return reference_logprobs(reference, samples, ref_residuals, *settings)

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


def importance_weights(minibatch: ReplayMinibatch, args: RLHFArgs) -> MinibatchTokens | None:
    """Return the weight of each token of a rollout engine; None without correction.

    Every policy objective is linear in the advantages for weights >= 0, so they are multiplied.
    """
    if minibatch.engine_logprobs is None or args.importance_correction == "none":
        return None
    is_masked = args.importance_correction == "masked"
    weigh = F.masked_importance_weights if is_masked else F.truncated_importance_weights
    logprobs, mask = minibatch.logprobs, minibatch.mask
    return weigh(logprobs, minibatch.engine_logprobs, IMPORTANCE_CAP, mask)


def surrogate_per_token(
    logprobs: MinibatchTokens, minibatch: ReplayMinibatch, args: RLHFArgs
) -> MinibatchTokens:
    """Compute what each token adds to the policy objective, by the package's functions."""
    old, advantages, mask = minibatch.logprobs, minibatch.advantages, minibatch.mask
    advantages = minibatch.whitened_advantages() if args.normalize_advantages else advantages
    weights = importance_weights(minibatch, args)
    if args.max_log_ratio is not None:
        logprobs = old + (logprobs - old).clamp(-args.max_log_ratio, args.max_log_ratio)
    advantages = advantages if weights is None else weights * advantages
    given = {"logprobs": logprobs, "old_logprobs": old, "advantages": advantages, "mask": mask}
    given |= {name: getattr(args, name) for name in ("clip_coef", "clip_coef_high", "dual_clip")}
    loss = F.look_up(args.policy_loss, F.POLICY_OBJECTIVES, "policy_loss")
    per_token = F.call_by_name(loss, given, "policy_loss")
    weight = token_weights(mask, args.loss_aggregation, args.gen_len)
    return F.zero_masked(per_token * weight, mask)


def token_weights(
    mask: Bool[Tensor, "batch gen"], aggregation: str, gen_len: int
) -> Float[Tensor, "batch 1"]:
    """Return the weight of each row's tokens in an aggregation of `functional.aggregate`."""
    weights = 1 / F.aggregation_denominator(mask, aggregation, gen_len).expand(len(mask), 1)
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    return weights / lengths if aggregation == "sequence_mean" else weights
