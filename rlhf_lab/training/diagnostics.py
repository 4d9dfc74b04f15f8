"""Signs, reported once in a run, that learning is dead or has exploded; checks for nan."""

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import RunError
from rlhf_lab.samples import Samples
from rlhf_lab.training.report import RolloutStats
from rlhf_lab.training.rollout import Rollout

if TYPE_CHECKING:
    from rlhf_lab.training.trainer import RLHFTrainer

MOST_KL_PER_TOKEN = 2.0  # nats; a token is then over seven times as likely as under the reference
TOO_FAST = "Lower the learning rates or raise kl_coef"
LEAST_KL_PER_TOKEN = 1e-4  # nats; fp32 rounds at 1e-6, and learning moves a token by 1e-3 a phase
LEAST_ENTROPY = 1e-3  # nats per token; 39 of 40 samples of 26 tokens are then the same text


def diagnose_batch(
    stats: RolloutStats, rollout: Rollout, args: RLHFArgs | None = None, phase: int = 0
) -> dict[str, str]:
    """Return a sentence for each sign of a batch, by name; most batches have none."""
    signs, several = {}, len(rollout.texts) > 1
    learns = several and not (args is not None and args.reward_fn == "zero" and args.kl_coef)
    if several and not math.isfinite(stats.reward_std):
        signs["reward_spread"] = (
            f"the rewards are so large that their spread is {stats.reward_std} in single "
            "precision; scale them down."
        )
    elif learns and stats.reward_std == 0:
        signs["reward_spread"] = (
            f"every sample got a reward of {stats.mean_reward:.4g}: nothing is learned; check the "
            "reward and the samples."
        )
    elif learns and bool((rollout.rewards == rollout.rewards[0]).all()):
        signs["reward_spread"] = (
            "all rewards are equal after penalties and clipping: nothing is learned; check "
            "penalize_no_eos, min_response_length and reward_clip."
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
    stops = args is not None and (args.stop_tokens or args.stop_token_ids)
    is_full = stops and stats.response_length >= rollout.samples.mask.shape[1]
    if is_full and not args.stop_at_eos and len(rollout.samples.tokens[:, -1].unique()) > 1:
        signs["unended"] = (
            f"no response ended at {stops!r}, and the end-of-sequence token is not a stop token; "
            "set stop_at_eos=True or choose other stop tokens."
        )
    if args is not None and not args.base_lr and not args.head_lr:
        signs["rates"] = "base_lr and head_lr are 0: nothing learns; raise one of them."
    is_late = args is not None and args.base_lr and phase > max(3, args.warmup_steps) and not signs
    if is_late and not args.reset_reference_every and stats.kl_per_token < LEAST_KL_PER_TOKEN:
        signs["unmoved"] = (
            f"after {phase} phases the KL from the reference is {stats.kl_per_sequence:.2g} nats "
            "per sequence: the policy has hardly moved; raise base_lr or lower kl_coef."
        )
    return signs


def validate_finite_weights(trainer: "RLHFTrainer") -> None:
    """Raise RunError if a weight of the policy or its reference is not finite."""
    for model, role in ((trainer.policy, "policy"), (trainer.reference, "reference")):
        if name := broken_weight(model):
            remedy = TOO_FAST if trainer.phase else "Choose another model"
            raise RunError(
                f"the {role}'s weight {name} contains nan or inf in phase {trainer.phase} "
                f"(base_model={trainer.args.base_model!r}). {remedy}."
            )


def validate_finite_samples(samples: Samples, phase: int) -> Samples:
    """Return samples; raise RunError if the policy that sampled them gave nan."""
    if not bool(samples.logprobs.isfinite().all()):
        raise RunError(
            f"The log-probs of samples are not finite in phase {phase}. {TOO_FAST}; what was saved "
            "before is intact."
        )
    return samples


def broken_weight(model: nn.Module) -> str | None:
    """Return the name of the first weight that contains nan or inf; None if all are finite."""
    weights = {n: w for n, w in model.named_parameters() if w.is_floating_point()}
    finite = torch.stack([torch.isfinite(weight).all() for weight in weights.values()])
    named = zip(weights, finite.tolist(), strict=True)  # one wait for the device
    return next((name for name, is_finite in named if not is_finite), None)
