"""Statistics of a learning phase: what a minibatch did, and whether it may be learned from."""

import math
import warnings
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import RunError
from rlhf_lab.models.device import LOGPROB_ROUNDING
from rlhf_lab.training.diagnostics import cause_of_nan
from rlhf_lab.training.replay import ReplayMemory, ReplayMinibatch
from rlhf_lab.training.report import LearningStats

if TYPE_CHECKING:
    from rlhf_lab.training.ppo import ObjectiveTerms
    from rlhf_lab.training.trainer import RLHFTrainer

StepVerdict = Literal["step", "skip", "stop"]
TERMS = ("objective", "clipped_surrogate", "value_loss", "entropy_bonus", "kl_penalty")
KL_TOLERANCE = 1.5


class PhaseStats:
    """Collects the numbers of a phase's minibatches, and judges each before its step.

    A GPU works through a queue of operations while the host prepares the next ones; every number
    that the host reads has to wait until the queue is empty. So the host reads once, at the end.
    """

    def __init__(self, trainer: "RLHFTrainer") -> None:
        self.trainer, self.args = trainer, trainer.args
        self._steps: list[dict[str, Float[Tensor, ""]]] = []
        self._first_ratio: Float[Tensor, ""] | None = None
        self._skipped = 0

    def judge(self, terms: "ObjectiveTerms", minibatch: ReplayMinibatch) -> StepVerdict:
        """Whether to step on this minibatch, skip it or stop the phase; see `judge_step`."""
        if self._first_ratio is None:
            self._first_ratio = furthest_ratio(terms, minibatch)
        verdict = judge_step(terms, minibatch, self.args)
        self._skipped += verdict == "skip"
        return verdict

    def add(
        self, terms: "ObjectiveTerms", minibatch: ReplayMinibatch, grad_norm: Float[Tensor, ""]
    ) -> None:
        """Take in a minibatch on which a step was taken."""
        new, old, mask = terms.logprobs, minibatch.logprobs, minibatch.mask
        with torch.no_grad():
            self._steps.append(
                {
                    **{name: getattr(terms, name).detach() for name in TERMS},
                    "clip_fraction": clipped_fraction(new, minibatch, self.args),
                    "approx_kl_per_token": F.masked_mean(F.kl_estimate(old, new, "k3"), mask),
                    "mean_ratio": F.mean_ratio(new, old, mask),
                    "grad_norm": grad_norm.detach(),
                }
            )

    def learning_stats(self, memory: ReplayMemory) -> LearningStats:
        """The means over all steps of the phase, read from the device in one go.

        Raises:
            RunError: something was not finite, or there was no step.
        """
        noted = [number for of_step in self._steps for number in of_step.values()]
        first_ratio, *numbers = torch.stack([self._first_ratio, *noted]).tolist()
        read = iter(numbers)
        stats = [{name: next(read) for name in of_step} for of_step in self._steps]
        self._warn_if_off_policy(first_ratio)
        for of_step in stats:
            self._refuse_non_finite("objective", of_step["objective"])
            self._refuse_non_finite("gradient norm", of_step["grad_norm"])
        if not stats:
            raise RunError(
                f"no step was taken in phase {self.trainer.phase}, whose first minibatch has a "
                f"ratio of {first_ratio:.4g}; raise ratio_threshold or target_kl, or lower base_lr."
            )
        dealt = memory.num_minibatches * memory.passes
        return LearningStats(
            ratio_first_minibatch=first_ratio,
            skipped_minibatches=self._skipped,
            unused_minibatches=dealt - len(stats) - self._skipped,
            **{name: sum(of_step[name] for of_step in stats) / len(stats) for name in stats[0]},
        )

    def _refuse_non_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            remedy = cause_of_nan(self.trainer, "lower the learning rates or raise kl_coef")
            raise RunError(
                f"the {what} became {value} in phase {self.trainer.phase}; {remedy} "
                "(what was saved before is intact)."
            )

    def _warn_if_off_policy(self, ratio: float) -> None:
        if math.isnan(ratio) or abs(ratio - 1) <= LOGPROB_ROUNDING[self.args.rounding]:
            return
        own, policy = self.trainer.own_parts, self.trainer.policy
        causes = [f"own part {part}" for part in own if part in ("policy", "logprobs")]
        if next(policy.parameters()).dtype != torch.float32:
            causes.append("a policy in half precision")
        # one that acts during both may still tell them apart, by the event that it is told
        causes += [
            f"the intervention {each['name']!r}" for each in self.trainer.interventions.records
        ]
        if any(point.fwd_hooks for point in policy.base_model.hook_dict.values()):
            causes.append(
                "a hook on base_model that acts differently on one token than on a sequence"
            )
        warnings.warn(
            f"phase {self.trainer.phase}: the policy that is trained is not the policy that "
            f"sampled: a ratio of {ratio:.4g} on the first minibatch; "
            f"look at {' and '.join(causes) or 'the sampling settings'}.",
            stacklevel=4,
        )


def clipped_fraction(
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
def judge_step(terms: "ObjectiveTerms", minibatch: ReplayMinibatch, args: RLHFArgs) -> StepVerdict:
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
def furthest_ratio(terms: "ObjectiveTerms", minibatch: ReplayMinibatch) -> Float[Tensor, ""]:
    """Of the probability ratios of the real tokens, the one that is furthest from 1."""
    ratio = F.policy_ratio(terms.logprobs, minibatch.logprobs).flatten()
    distance = (ratio - 1).abs().masked_fill(~minibatch.mask.flatten(), -1.0)
    return ratio.gather(0, distance.argmax(0, keepdim=True))[0]
