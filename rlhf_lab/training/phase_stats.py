"""Statistics of a learning phase, and signs that learning is dead or has exploded.

`PhaseStats` judges each minibatch: step, skip it or stop; `diagnose_batch` reads a whole batch.
"""

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
from rlhf_lab.training.report import LearningStats, RolloutStats
from rlhf_lab.training.rollout import ReplayMemory, ReplayMinibatch, Rollout

if TYPE_CHECKING:
    from rlhf_lab.training.ppo import ObjectiveTerms
    from rlhf_lab.training.trainer import RLHFTrainer

StepVerdict = Literal["step", "skip", "stop"]
TERMS = ("objective", "clipped_surrogate", "value_loss", "entropy_bonus", "kl_penalty")
KL_TOLERANCE = 1.5
MOST_KL_PER_TOKEN = 2.0  # nats; a token is then over seven times as likely as under the reference
TOO_FAST = "Lower the learning rates or raise kl_coef"
LEAST_KL_PER_TOKEN = 1e-4  # nats; fp32 rounds at 1e-6, and learning moves a token by 1e-3 a phase
LEAST_ENTROPY = 1e-3  # nats per token; 39 of 40 samples of 26 tokens are then the same text


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


def diagnose_batch(
    stats: RolloutStats, rollout: Rollout, args: RLHFArgs, phase: int = 0
) -> dict[str, str]:
    """Return a sentence for each sign of a batch, by name; most batches have none."""
    signs, several = {}, len(rollout.texts) > 1
    learns = several and not (args.reward_fn == "zero" and args.kl_coef)
    if several and not math.isfinite(stats.reward_std):
        signs["reward_spread"] = (
            f"the rewards are so large that their spread is {stats.reward_std} in single "
            "precision; scale them down."
        )
    elif learns and (stats.reward_std == 0 or bool((rollout.rewards == rollout.rewards[0]).all())):
        signs["reward_spread"] = (
            f"all rewards are equal (mean {stats.mean_reward:.4g}): nothing is learned; check the "
            "reward, penalize_no_eos, min_response_length and reward_clip."
        )
    if several and len(set(rollout.texts)) == 1:
        n = len(rollout.texts)
        signs["alike"] = f"all {n} responses are the same text; raise temperature or ent_coef."
    if stats.uninformative_group_fraction == 1 and rollout.compared:
        signs["groups"] = (
            "all responses to each prompt have the same reward, so comparing them teaches nothing; "
            "raise samples_per_prompt or temperature, or check the reward."
        )
    if stats.entropy_per_token < LEAST_ENTROPY:
        signs["entropy"] = (
            f"the entropy is {stats.entropy_per_token:.2g} nats per token: the policy hardly "
            "explores; lower the learning rates, or raise ent_coef, kl_coef or temperature."
        )
    if stats.kl_per_token > MOST_KL_PER_TOKEN:
        signs["kl"] = (
            f"the KL from the reference is {stats.kl_per_token:.3g} nats per token "
            f"({stats.kl_per_sequence:.3g} per sequence), above {MOST_KL_PER_TOKEN:g}: the policy "
            "is far from it; lower the learning rates or raise kl_coef."
        )
    stops = args.stop_tokens or args.stop_token_ids
    is_full = stops and stats.response_length >= rollout.samples.mask.shape[1]
    if is_full and not args.stop_at_eos and len(rollout.samples.tokens[:, -1].unique()) > 1:
        signs["unended"] = (
            f"no response ended at {stops!r}, and the end-of-sequence token is not a stop token; "
            "set stop_at_eos=True or choose other stop tokens."
        )
    if not args.base_lr and not args.head_lr:
        signs["rates"] = "base_lr and head_lr are 0: nothing learns; raise one of them."
    is_late = args.base_lr and phase > max(3, args.warmup_steps) and not signs
    if is_late and not args.reset_reference_every and stats.kl_per_token < LEAST_KL_PER_TOKEN:
        signs["unmoved"] = (
            f"after {phase} phases the KL from the reference is {stats.kl_per_sequence:.2g} nats "
            "per sequence: the policy has hardly moved; raise base_lr or lower kl_coef."
        )
    return signs


def validate_finite_weights(trainer: "RLHFTrainer") -> None:
    """Raise RunError if a weight of the policy or its reference is not finite."""
    for model, role in ((trainer.policy, "policy"), (trainer.reference, "reference")):
        weights = {n: w for n, w in model.named_parameters() if w.is_floating_point()}
        finite = torch.stack([weight.isfinite().all() for weight in weights.values()])
        if not all(flags := finite.tolist()):  # one wait for the device
            name = list(weights)[flags.index(False)]
            remedy = TOO_FAST if trainer.phase else "Choose another model"
            raise RunError(
                f"the {role}'s weight {name} contains nan or inf in phase {trainer.phase} "
                f"(base_model={trainer.args.base_model!r}). {remedy}."
            )
