"""The objective of one minibatch, put together from functions that the caller can replace."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import Forward, TransformerWithValueHead, run_policy
from rlhf_lab.models.device import product_dtype
from rlhf_lab.models.transformer_lens import HookedTransformer
from rlhf_lab.training.replay import ReplayMinibatch

Verdict = Literal["step", "skip", "stop"]
KL_TOLERANCE = 1.5
# the parts that are called with positional arguments, and with which
CALLED_WITH = {
    "normalize_reward": "rewards",
    "logprobs": "logits tokens prefix_len temperature",
    "clipped_surrogate": "logprobs old_logprobs advantages clip_coef mask normalize",
    "value_loss": "values returns vf_coef mask old_values clip",
    "entropy_bonus": "logits ent_coef mask",
    "kl_penalty": "logits ref_logits kl_coef mask",
}


@dataclass(frozen=True)
class Functions:
    """The functions that make advantages and objective; each can be the caller's own.

    Args:
        normalize_reward: `(rewards)`, used when `args.normalize_reward`.
        advantages: any of `values`, `rewards`, `token_rewards`, `mask`, `gamma`, `lam`, `group` and
            `greedy_rewards`, by the names of its parameters (`*args`: values, rewards, mask); None
            takes the estimator that `args.advantages` names.
        logprobs: `(logits, tokens, prefix_len, temperature)`.
        clipped_surrogate: `(logprobs, old_logprobs, advantages, clip_coef, mask, normalize)`, PPO's
            in its plain form.
        policy_loss: what each token adds to the policy's objective; any of `logprobs`,
            `old_logprobs`, `advantages`, `mask`, `clip_coef`, `clip_coef_high` and `dual_clip`, by
            the names of its parameters (`*args`: logprobs, old_logprobs, advantages, clip_coef,
            mask); None takes the one that `args.policy_loss` names.
        value_loss: `(values, returns, vf_coef, mask, old_values, clip)`.
        entropy_bonus: `(logits, ent_coef, mask)`.
        kl_penalty: `(logits, ref_logits, kl_coef, mask)`, for the exact KL in the loss.
        kl_estimator: the KL of each token from those of `logprobs`, `ref_logprobs` and `mask` that
            its parameters name (`*args`: the first two); None takes what `args.kl_estimator` names.
    """

    normalize_reward: Callable[..., Tensor] = F.normalize_reward
    advantages: Callable[..., Tensor] | None = None
    logprobs: Callable[..., Tensor] = F.get_logprobs
    clipped_surrogate: Callable[..., Tensor] = F.calc_clipped_surrogate_objective
    policy_loss: Callable[..., Tensor] | None = None
    value_loss: Callable[..., Tensor] = F.calc_value_function_loss
    entropy_bonus: Callable[..., Tensor] = F.calc_entropy_bonus
    kl_penalty: Callable[..., Tensor] = F.calc_kl_penalty
    kl_estimator: Callable[..., Tensor] | None = None

    @classmethod
    def choose(cls, given: dict[str, Any]) -> "Functions":
        """The defaults, with those that the caller gives in their place.

        Raises:
            ConfigError: a name that is no part of the trainer, or a function that takes other
                arguments than that part is called with.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in names:
                raise ConfigError(
                    f"RLHFTrainer has no part {name!r}; the parts are {', '.join(names)}."
                )
        for name, arguments in CALLED_WITH.items():
            if name in given:
                try:
                    F.check_order(given[name], arguments.split(), name)
                except ValueError as error:
                    raise ConfigError(str(error)) from error
        return cls(**given)

    def check(self, args: RLHFArgs) -> None:
        """Refuse a function of the caller's that these arguments would leave unused.

        Raises:
            ConfigError: there is one.
        """
        own_surrogate = self.clipped_surrogate is not F.calc_clipped_surrogate_objective
        if own_surrogate and not self.clips_plainly(args):
            raise ConfigError(
                "clipped_surrogate is called for the plain policy_loss='ppo' only; leave "
                "policy_loss, clip_coef_high, dual_clip and loss_aggregation as they were, or hand "
                "it in as policy_loss."
            )
        own_penalty = self.kl_penalty is not F.calc_kl_penalty
        if own_penalty and (args.kl_in != "loss" or self.sampled_kl(args) is not None):
            raise ConfigError(
                "kl_penalty is called for kl_in='loss' with kl_estimator='exact' only; leave them "
                "so, or hand in a kl_estimator of your own."
            )

    def sampled_kl(self, args: RLHFArgs) -> str | Callable[..., Tensor] | None:
        """What estimates the KL from sampled tokens; None where it is the exact one."""
        if self.kl_estimator is not None:
            return self.kl_estimator
        return None if args.kl_estimator == "exact" else args.kl_estimator

    def clips_plainly(self, args: RLHFArgs) -> bool:
        """Whether the policy's objective is `clipped_surrogate`: one clip, a mean over tokens."""
        return (
            self.policy_loss is None
            and (args.policy_loss, args.loss_aggregation) == ("ppo", "token_mean")
            and args.clip_coef_high is None
            and args.dual_clip is None
        )

    def estimate_advantages(
        self,
        args: RLHFArgs,
        values: Float[Tensor, "batch gen"],
        rewards: Float[Tensor, " batch"],
        mask: Bool[Tensor, "batch gen"],
        token_rewards: Float[Tensor, "batch gen"] | None = None,
        group: Int[Tensor, " batch"] | None = None,
        greedy_rewards: Float[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch gen"]:
        """Advantages by the caller's estimator, or by the one that `args.advantages` names.

        Args:
            token_rewards: of each token; the reward at the last real one and nothing elsewhere,
                when None.
            group: a number that the answers to one prompt share.
            greedy_rewards: what the greedy answer to each row's prompt earns.
        """
        if token_rewards is None:
            token_rewards = F.token_rewards(rewards, mask)
        return F.estimate_advantages(
            self._estimator(args),
            values,
            token_rewards,
            mask,
            gamma=args.gamma,
            lam=args.gae_lambda,
            group=group,
            greedy_rewards=greedy_rewards,
        )

    def estimate_returns(
        self,
        args: RLHFArgs,
        advantages: Float[Tensor, "batch gen"],
        values: Float[Tensor, "batch gen"],
        token_rewards: Float[Tensor, "batch gen"],
        mask: Bool[Tensor, "batch gen"],
    ) -> Float[Tensor, "batch gen"]:
        """What the value head is trained towards.

        Advantages plus values; where the estimator does without values, the rewards to go.
        """
        parameters = self._parameters(args)
        any_order = inspect.Parameter.VAR_POSITIONAL in {p.kind for p in parameters.values()}
        if "values" in parameters or any_order:
            return F.compute_returns(advantages, values, mask)
        return F.rewards_to_go(token_rewards, args.gamma, mask)

    def compares_with_greedy(self, args: RLHFArgs) -> bool:
        """Whether the estimator of the advantages wants the rewards of greedy answers."""
        return "greedy_rewards" in self._parameters(args)

    def _estimator(self, args: RLHFArgs) -> Callable[..., Tensor]:
        """The caller's own estimator of advantages, or the one that `args` names."""
        return F.look_up(self.advantages or args.advantages, F.ADVANTAGES, "advantages")

    def _parameters(self, args: RLHFArgs) -> Mapping[str, inspect.Parameter]:
        """What the estimator of the advantages takes."""
        return inspect.signature(self._estimator(args)).parameters

    @property
    def read_logits(self) -> bool:
        """Whether one of the caller's functions wants to see the logits of the whole vocabulary."""
        own = (self.logprobs, self.entropy_bonus, self.kl_penalty)
        return own != (F.get_logprobs, F.calc_entropy_bonus, F.calc_kl_penalty)


@dataclass(frozen=True)
class ObjectiveTerms:
    """The objective of a minibatch and what it is made of.

    Args:
        objective: clipped_surrogate - value_loss + entropy_bonus - kl_penalty, to be maximised.
        clipped_surrogate: the policy's objective, whichever `args.policy_loss` names.
        logprobs: of the minibatch's tokens under the policy as it is now.
        values: of the states before them.
    """

    objective: Float[Tensor, ""]
    clipped_surrogate: Float[Tensor, ""]
    value_loss: Float[Tensor, ""]
    entropy_bonus: Float[Tensor, ""]
    kl_penalty: Float[Tensor, ""]
    logprobs: Float[Tensor, "minibatch gen"]
    values: Float[Tensor, "minibatch gen"]


def run_forward(args: RLHFArgs) -> Forward:
    """How a run with these settings goes through its models."""
    return Forward(dtype=product_dtype(args.precision), recompute=args.activation_checkpointing)


def objective_terms(
    policy: TransformerWithValueHead,
    reference: HookedTransformer,
    minibatch: ReplayMinibatch,
    args: RLHFArgs,
    functions: Functions,
    kl_coef: float | None = None,
) -> ObjectiveTerms:
    """The objective of one minibatch, with gradients; `args.kl_coef` counts unless one is given.

    1. Run the policy once, and read the reference's logits out of its residuals; in chunks, where
       the models run packed and no function of the caller's wants to see logits.
    2. Weigh the four terms: clipped surrogate - value loss + entropy bonus - KL penalty. Entropy
       and the exact KL are of the whole next-token distribution at that temperature, at generated
       tokens only.

    Source: Schulman et al. 2017, PPO, equation 9, with the KL penalty of Ziegler et al. 2019 as a
    term of its own.
    """
    mask, forward = minibatch.mask, run_forward(args)
    kl_coef = args.kl_coef if kl_coef is None else kl_coef
    exact = args.kl_in == "loss" and functions.sampled_kl(args) is None
    out = run_policy(
        policy,
        minibatch.tokens,
        minibatch.prefix_len,
        args.temperature,
        attention_mask=minibatch.attention_mask if minibatch.padded else None,
        support=minibatch.support,
        reference=reference if exact else None,
        ref_residuals=minibatch.ref_residuals,
        forward=forward,
        logprobs=functions.logprobs,
        want_logits=functions.read_logits,
    )
    logprobs, values = out.logprobs, out.values
    kl_penalty = None
    if out.logits is None:
        entropy_bonus = args.ent_coef * F.masked_mean(out.entropy, mask)
        if exact:
            kl_penalty = kl_coef * F.masked_mean(out.kl, mask)
    else:
        entropy_bonus = one_number(
            functions.entropy_bonus(out.logits, args.ent_coef, mask), "entropy_bonus"
        )
        if exact:
            kl_penalty = one_number(
                functions.kl_penalty(out.logits, out.ref_logits, kl_coef, mask), "kl_penalty"
            )
    if kl_penalty is None:
        kl_penalty = sampled_kl_penalty(logprobs, minibatch, args, functions, kl_coef)
    clipped_surrogate = policy_objective(logprobs, minibatch, args, functions)
    value_loss = one_number(
        functions.value_loss(
            values, minibatch.returns, args.vf_coef, mask, minibatch.values, args.vf_clip
        ),
        "value_loss",
    )
    return ObjectiveTerms(
        objective=clipped_surrogate - value_loss + entropy_bonus - kl_penalty,
        clipped_surrogate=clipped_surrogate,
        value_loss=value_loss,
        entropy_bonus=entropy_bonus,
        kl_penalty=kl_penalty,
        logprobs=logprobs.detach(),
        values=values.detach(),
    )


def one_number(term: Any, part: str) -> Float[Tensor, ""]:
    """The term of the objective that a part of the trainer returned.

    Raises:
        ConfigError: it is no single number, as when the function leaves out the mean.
    """
    if isinstance(term, Tensor) and not term.ndim:
        return term
    what = f"a tensor of shape {tuple(term.shape)}" if isinstance(term, Tensor) else repr(term)
    raise ConfigError(
        f"{part} returned {what}; return one number in a tensor, such as the masked_mean over the "
        "real tokens."
    )


def climb_in_parts(
    policy: TransformerWithValueHead,
    reference: HookedTransformer,
    minibatch: ReplayMinibatch,
    args: RLHFArgs,
    functions: Functions,
    kl_coef: float,
    part_size: int,
) -> ObjectiveTerms:
    """Add the gradient of the objective to the policy's, a few sequences at a time.

    1. Whiten the advantages over the whole minibatch, if so asked.
    2. Take the terms of each part, which are means over its tokens (or sequences), times its share
       of the minibatch's tokens (or sequences), so that they add up to those of the whole.
    3. Go back through each part before the next, so that only one is in memory.

    Value and gradient are those of `objective_terms`, however the minibatch is cut. The terms that
    come back have no graph.
    """
    advantages = minibatch.advantages
    if args.normalize_advantages:
        advantages = F.whiten(advantages, minibatch.mask)
    whole = dataclasses.replace(minibatch, advantages=advantages)
    args = dataclasses.replace(args, normalize_advantages=False)
    found = []
    for rows in torch.arange(len(advantages), device=advantages.device).split(part_size):
        part = whole[rows]
        terms = objective_terms(policy, reference, part, args, functions, kl_coef)
        found.append(_weigh(terms, part.mask, whole.mask, args))
        found[-1].objective.backward()
        found[-1] = _map(Tensor.detach, found[-1])
    scalars = [x.ndim == 0 for x in vars(found[0]).values()]
    columns = zip(scalars, *(vars(terms).values() for terms in found), strict=True)
    return ObjectiveTerms(*(sum(xs) if scalar else torch.cat(xs) for scalar, *xs in columns))


def _weigh(
    terms: ObjectiveTerms,
    part: Bool[Tensor, "part gen"],
    whole: Bool[Tensor, "minibatch gen"],
    args: RLHFArgs,
) -> ObjectiveTerms:
    """The terms of a part, times its share of what they are means over."""
    by_token, by_aggregation = (
        F.aggregation_denominator(part, name) / F.aggregation_denominator(whole, name).clamp(min=1)
        for name in ("token_mean", args.loss_aggregation)
    )
    surrogate = by_aggregation * terms.clipped_surrogate
    others = (terms.value_loss, terms.entropy_bonus, terms.kl_penalty)
    value_loss, entropy_bonus, kl_penalty = (by_token * term for term in others)
    objective = surrogate - value_loss + entropy_bonus - kl_penalty
    rest = (value_loss, entropy_bonus, kl_penalty, terms.logprobs, terms.values)
    return ObjectiveTerms(objective, surrogate, *rest)


def _map(function: Callable[[Tensor], Tensor], terms: ObjectiveTerms) -> ObjectiveTerms:
    """A function of each of the terms."""
    return ObjectiveTerms(*map(function, vars(terms).values()))


def policy_objective(
    logprobs: Float[Tensor, "minibatch gen"],
    minibatch: ReplayMinibatch,
    args: RLHFArgs,
    functions: Functions,
) -> Float[Tensor, ""]:
    """The policy's part of the objective: PPO's, or the one that was chosen in its place.

    1. Hold the log-ratios within `args.max_log_ratio`, if so asked.
    2. Let the chosen function say what each token adds, and aggregate as `args.loss_aggregation`
       says.
    """
    old, advantages, mask = minibatch.logprobs, minibatch.advantages, minibatch.mask
    logprobs = _held(logprobs, old, args)
    if functions.clips_plainly(args):
        surrogate = functions.clipped_surrogate(
            logprobs, old, advantages, args.clip_coef, mask, args.normalize_advantages
        )
        return one_number(surrogate, "clipped_surrogate")
    return F.calc_policy_objective(
        functions.policy_loss or args.policy_loss,
        logprobs,
        old,
        advantages,
        mask,
        clip_coef=args.clip_coef,
        clip_coef_high=args.clip_coef_high,
        dual_clip=args.dual_clip,
        normalize=args.normalize_advantages,
        aggregation=args.loss_aggregation,
        denominator=F.aggregation_denominator(mask, args.loss_aggregation, args.gen_len),
    )


def _held(
    logprobs: Float[Tensor, "minibatch gen"],
    old: Float[Tensor, "minibatch gen"],
    args: RLHFArgs,
) -> Float[Tensor, "minibatch gen"]:
    """Log-probabilities whose distance from the old ones is at most `args.max_log_ratio`."""
    if args.max_log_ratio is None:
        return logprobs
    return old + (logprobs - old).clamp(-args.max_log_ratio, args.max_log_ratio)


def surrogate_shares(
    logprobs: Float[Tensor, "minibatch gen"], minibatch: ReplayMinibatch, args: RLHFArgs
) -> Float[Tensor, "minibatch gen"]:
    """What each token adds to `policy_objective` with the package's functions; they sum to it.

    1. Take what the chosen loss gives each token.
    2. Multiply by its weight in the aggregation: one over the number of real tokens, over the
       number of responses and the token's own response, or over responses times gen_len.
    """
    old, advantages, mask = minibatch.logprobs, minibatch.advantages, minibatch.mask
    given = {
        "logprobs": _held(logprobs, old, args),
        "old_logprobs": old,
        "advantages": F.whiten(advantages, mask) if args.normalize_advantages else advantages,
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


def penalized_kl(
    logprobs: Float[Tensor, "minibatch gen"],
    exact: Float[Tensor, "minibatch gen"],
    minibatch: ReplayMinibatch,
    args: RLHFArgs,
) -> Float[Tensor, "minibatch gen"]:
    """The KL of each token that the loss pays for: exact, estimated, or 0 if the reward pays."""
    if args.kl_in == "reward":
        return torch.zeros_like(exact)
    if args.kl_estimator == "exact":
        return exact
    return F.kl_estimate(logprobs, minibatch.ref_logprobs, args.kl_estimator, minibatch.mask)


def sampled_kl_penalty(
    logprobs: Float[Tensor, "minibatch gen"],
    minibatch: ReplayMinibatch,
    args: RLHFArgs,
    functions: Functions,
    kl_coef: float,
) -> Float[Tensor, ""]:
    """The KL penalty from sampled tokens alone; 0 where the rewards have paid for the KL."""
    if args.kl_in == "reward":
        return logprobs.new_zeros(())
    if minibatch.ref_logprobs is None:
        raise ConfigError(
            f"kl_estimator={args.kl_estimator!r} needs the rollout's ref_logprobs, which are "
            "missing; make the rollout with the trainer's own rollout_phase."
        )
    estimator, reference = functions.sampled_kl(args), minibatch.ref_logprobs
    return F.calc_sampled_kl_penalty(logprobs, reference, estimator, kl_coef, minibatch.mask)


def clip_fraction(
    logprobs: Float[Tensor, "minibatch gen"], minibatch: ReplayMinibatch, args: RLHFArgs
) -> Float[Tensor, ""]:
    """The share of real tokens that the policy loss clips, which for GSPO are whole responses."""
    old, mask = minibatch.logprobs, minibatch.mask
    if args.policy_loss == "policy_gradient":
        return logprobs.new_zeros(())
    if args.policy_loss == "gspo":
        ratio = F.sequence_ratio(logprobs, old, mask)[:, None].expand(mask.shape)
        logprobs, old = ratio.log(), torch.zeros_like(ratio)
    if args.clip_coef_high is None:
        return F.clip_fraction(logprobs, old, args.clip_coef, mask)
    low = F.clip_fraction_low(logprobs, old, args.clip_coef, mask)
    return low + F.clip_fraction_high(logprobs, old, args.clip_coef_high, mask)


@torch.no_grad()
def judge_step(terms: ObjectiveTerms, minibatch: ReplayMinibatch, args: RLHFArgs) -> Verdict:
    """Whether the policy is still close enough to the one that sampled to learn from its samples.

    1. "stop" if KL(old policy || policy), estimated by k3 over the real tokens, exceeds 1.5 times
       `args.target_kl`: the rest of the phase would move it further yet.
    2. "skip" if the mean ratio exceeds `args.ratio_threshold`: this minibatch is an outlier.
    3. "step" otherwise.

    Source: the early stop of OpenAI's Spinning Up, and the skip of TRL's PPO trainer, which there
    multiplies the loss by 0 and steps all the same.
    """
    new, old, mask = terms.logprobs, minibatch.logprobs, minibatch.mask
    if args.target_kl is not None:
        moved = F.masked_mean(F.kl_estimate(old, new, "k3"), mask)
        if moved > KL_TOLERANCE * args.target_kl:
            return "stop"
    if args.ratio_threshold is not None:
        if F.mean_ratio(new, old, mask) > args.ratio_threshold:
            return "skip"
    return "step"


@torch.no_grad()
def furthest_ratio(terms: ObjectiveTerms, minibatch: ReplayMinibatch) -> Float[Tensor, ""]:
    """Of the probability ratios of the real tokens, the one that is furthest from 1."""
    ratio = F.policy_ratio(terms.logprobs, minibatch.logprobs).flatten()
    distance = (ratio - 1).abs().masked_fill(~minibatch.mask.flatten(), -1.0)
    return ratio.gather(0, distance.argmax(0, keepdim=True))[0]


@torch.no_grad()
def minibatch_stats(
    terms: ObjectiveTerms,
    minibatch: ReplayMinibatch,
    grad_norm: float | Float[Tensor, ""],
    clip_coef: float,
    args: RLHFArgs | None = None,
) -> dict[str, Float[Tensor, ""]]:
    """The numbers of one minibatch that `LearningStats` averages, still on the device.

    Args:
        clip_coef: of the plain clipped surrogate.
        args: say what is clipped in its place, if given.
    """
    new, old, mask = terms.logprobs, minibatch.logprobs, minibatch.mask
    if args is None:
        clipped = F.clip_fraction(new, old, clip_coef, mask)
    else:
        clipped = clip_fraction(new, minibatch, args)
    return {
        "objective": terms.objective.detach(),
        "clipped_surrogate": terms.clipped_surrogate.detach(),
        "value_loss": terms.value_loss.detach(),
        "entropy_bonus": terms.entropy_bonus.detach(),
        "kl_penalty": terms.kl_penalty.detach(),
        "clip_fraction": clipped,
        "approx_kl_per_token": F.masked_mean(F.kl_estimate(old, new, "k3"), mask),
        "grad_norm": torch.as_tensor(grad_norm),
    }
