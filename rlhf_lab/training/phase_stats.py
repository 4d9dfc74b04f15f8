"""Statistics of a learning phase, and the decision to step on a minibatch, skip it or stop."""

import math
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import RunError
from rlhf_lab.training.diagnostics import TOO_FAST
from rlhf_lab.training.replay import ReplayMemory, ReplayMinibatch
from rlhf_lab.training.report import LearningStats

if TYPE_CHECKING:
    from rlhf_lab.training.ppo import ObjectiveTerms
    from rlhf_lab.training.trainer import RLHFTrainer

StepVerdict = Literal["step", "skip", "stop"]
TERMS = ("objective", "clipped_surrogate", "value_loss", "entropy_bonus", "kl_penalty")
KL_TOLERANCE = 1.5


@dataclass
class PhaseStats:
    """Collects the numbers of a phase's minibatches, and judges each before its step.

    The host reads them once, at the end of the phase, since it waits for a GPU at each read.
    """

    trainer: "RLHFTrainer"
    _steps: list[dict[str, Float[Tensor, ""]]] = field(init=False, default_factory=list)
    _first_ratio: Float[Tensor, ""] | None = field(init=False, default=None)
    _skipped: int = field(init=False, default=0)

    @torch.no_grad()
    def judge(self, terms: "ObjectiveTerms", minibatch: ReplayMinibatch) -> StepVerdict:
        """Decide whether the policy is close enough to the one that sampled to take a step.

        1. "stop" if KL(old policy || policy), estimated by k3 over the real tokens, exceeds 1.5
           times `args.target_kl`: the rest of the phase would move it further.
        2. "skip" if the mean ratio exceeds `args.ratio_threshold`: this minibatch is an outlier.

        Source: OpenAI's Spinning Up (stop), and TRL's PPO trainer (skip, but with a step of 0).
        """
        args, new, old, mask = self.trainer.args, terms.logprobs, minibatch.logprobs, minibatch.mask
        if self._first_ratio is None:  # the ratio that is furthest from 1
            ratio = F.policy_ratio(new, old).flatten()
            distance = (ratio - 1).abs().masked_fill(~mask.flatten(), -1.0)
            self._first_ratio = ratio.gather(0, distance.argmax(0, keepdim=True))[0]
        if args.target_kl is not None:
            moved = F.masked_mean(F.kl_estimate(old, new, "k3"), mask)
            if moved > KL_TOLERANCE * args.target_kl:
                return "stop"
        if args.ratio_threshold is not None and F.mean_ratio(new, old, mask) > args.ratio_threshold:
            self._skipped += 1
            return "skip"
        return "step"

    @torch.no_grad()
    def add(
        self, terms: "ObjectiveTerms", minibatch: ReplayMinibatch, grad_norm: Float[Tensor, ""]
    ) -> None:
        """Add the numbers of a minibatch on which a step was taken."""
        new, old, mask = terms.logprobs, minibatch.logprobs, minibatch.mask
        step = {name: getattr(terms, name).detach() for name in TERMS}
        step["clip_fraction"] = clipped_fraction(new, minibatch, self.trainer.args)
        step["approx_kl_per_token"] = F.masked_mean(F.kl_estimate(old, new, "k3"), mask)
        step["mean_ratio"] = F.mean_ratio(new, old, mask)
        self._steps.append(step | {"grad_norm": grad_norm.detach()})

    def learning_stats(self, memory: ReplayMemory) -> LearningStats:
        """Return the means over all steps; raise RunError if one is not finite."""
        numbers = [number for step in self._steps for number in step.values()]
        first_ratio, *numbers = torch.stack([self._first_ratio, *numbers]).tolist()
        if abs(first_ratio - 1) > self.trainer.objective.rounding:  # False for nan
            self._warn_if_off_policy(first_ratio)
        read, phase, n_steps = iter(numbers), self.trainer.phase, len(self._steps)
        steps = [{name: next(read) for name in step} for step in self._steps]
        for step in steps:
            for name, label in {"objective": "objective", "grad_norm": "gradient norm"}.items():
                if not math.isfinite(step[name]):
                    custom = ", ".join(self.trainer.custom_components)
                    remedy = f"Check the custom {custom}, or lower the learning rates"
                    raise RunError(
                        f"The {label} became {step[name]} in phase {phase}. "
                        f"{remedy if custom else TOO_FAST}; what was saved before is intact."
                    )
        if not steps:
            raise RunError(
                f"No step was taken in phase {phase}, whose first minibatch has a ratio of "
                f"{first_ratio:.4g}. Raise ratio_threshold or target_kl, or lower base_lr."
            )
        return LearningStats(
            ratio_first_minibatch=first_ratio,
            skipped_minibatches=self._skipped,
            unused_minibatches=memory.num_minibatches * memory.passes - n_steps - self._skipped,
            **{name: sum(step[name] for step in steps) / n_steps for name in steps[0]},
        )

    def _warn_if_off_policy(self, ratio: float) -> None:
        trainer, policy = self.trainer, self.trainer.policy
        causes = [
            f"custom {name}" for name in ("policy", "logprobs") if name in trainer.custom_components
        ]
        # an intervention of both stages can still act differently in each
        causes += [f"the intervention {r['name']!r}" for r in trainer.interventions.records]
        if next(policy.parameters()).dtype != torch.float32:
            causes.append("a policy in half precision")
        if any(point.fwd_hooks for point in policy.base_model.hook_dict.values()):
            causes.append("a hook that acts differently on one token than on a sequence")
        warnings.warn(
            f"phase {trainer.phase}: the policy that is trained is not the policy that sampled: a "
            f"ratio of {ratio:.4g} on the first minibatch. Check "
            f"{' and '.join(causes) or 'the sampling settings'}.",
            stacklevel=4,
        )


def clipped_fraction(
    logprobs: Float[Tensor, "minibatch gen"], minibatch: ReplayMinibatch, args: RLHFArgs
) -> Float[Tensor, ""]:
    """Compute the fraction of real tokens that the policy loss clips; whole responses for GSPO."""
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
