"""Remarks on a run whose learning is dead or has exploded, and the cause where a policy gives nan.

Learning is dead where nothing tells good from bad, and has exploded where the policy has left the
reference behind. Each remark is made once in a run.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import RunError
from rlhf_lab.training.report import RolloutStats
from rlhf_lab.training.rollout import Rollout

if TYPE_CHECKING:
    from rlhf_lab.training.trainer import RLHFTrainer

MOST_KL_PER_TOKEN = 2.0
"""Nats; a token is then more than seven times as likely as under the reference, on average."""
LEAST_ENTROPY = 1e-3
"""Nats per token; below it, a sample of 26 tokens is the same text 39 times out of 40."""


def diagnose_batch(
    stats: RolloutStats, rollout: Rollout, args: RLHFArgs | None = None
) -> dict[str, str]:
    """What is wrong with a batch for learning: a sentence for each sign, by its name.

    The signs are reward_spread, alike, groups, entropy and kl, and with `args` rates too; most
    batches have none.
    """
    signs = dict(_signs(stats, rollout))
    if args is not None and not args.base_lr and not args.head_lr:
        signs["rates"] = "base_lr and head_lr are 0: nothing learns; raise one of them."
    return signs


def _signs(stats: RolloutStats, rollout: Rollout) -> Iterator[tuple[str, str]]:
    several = len(rollout.texts) > 1
    if several and not math.isfinite(stats.reward_std):
        yield (
            "reward_spread",
            f"the rewards are so large that their spread is {stats.reward_std} in single "
            "precision; scale them down.",
        )
    elif several and stats.reward_std == 0:
        yield (
            "reward_spread",
            f"every sample earned {stats.mean_reward:.4g}: nothing tells good from bad; "
            "look at the reward and at the samples.",
        )
    elif several and bool((rollout.rewards == rollout.rewards[0]).all()):
        yield (
            "reward_spread",
            "all samples count the same after penalties and clipping, whatever they earned: "
            "nothing tells good from bad; look at penalize_no_eos, min_response_length and "
            "reward_clip.",
        )
    if several and len(set(rollout.texts)) == 1:
        yield (
            "alike",
            f"all {len(rollout.texts)} responses are the same text; raise temperature, top_k or "
            "ent_coef.",
        )
    if stats.uninformative_group_fraction == 1 and rollout.compared:
        yield (
            "groups",
            "the answers to each prompt all earn the same, so that comparing them teaches nothing; "
            "raise samples_per_prompt or temperature, or look at the reward.",
        )
    if stats.entropy_per_token < LEAST_ENTROPY:
        yield (
            "entropy",
            f"the entropy is {stats.entropy_per_token:.2g} nats per token: the policy hardly "
            "explores; lower the learning rates, or raise ent_coef, kl_coef or temperature.",
        )
    if stats.kl_per_token > MOST_KL_PER_TOKEN:
        yield (
            "kl",
            f"the KL from the reference is {stats.kl_per_token:.3g} nats per token "
            f"({stats.kl_per_sequence:.3g} per sequence), above {MOST_KL_PER_TOKEN:g}: the policy "
            "has left it behind; lower the learning rates or raise kl_coef.",
        )


def validate_finite(found: dict[str, Any], trainer: "RLHFTrainer") -> dict[str, Any]:
    """Figures of a policy, unless it gives nan: they would say nothing about it.

    Raises:
        RunError: KL or entropy is not finite, with its cause.
    """
    for name in ("kl_per_sequence", "entropy_per_token"):
        value = found.get(name)
        if value is not None and not math.isfinite(value):
            cause = cause_of_nan(trainer, "lower the learning rates or raise kl_coef")
            raise RunError(f"{name} is {value} in phase {trainer.phase}; {cause}.")
    return found


def validate_finite_weights(trainer: "RLHFTrainer") -> None:
    """Refuse to sample from a policy whose weights, or whose reference's, are not finite.

    Raises:
        RunError: the first weight that holds nan or inf.
    """
    for model, role in ((trainer.policy, "policy"), (trainer.reference, "reference")):
        name = broken_weight(model)
        if name:
            raise RunError(
                f"the {role}'s weight {name} holds nan or inf in phase {trainer.phase} "
                f"(base_model={trainer.args.base_model!r}); use a model that is whole."
            )


def cause_of_nan(trainer: "RLHFTrainer", otherwise: str) -> str:
    """What made a run's numbers nan or infinite, and the remedy; `otherwise` where it is learning.

    Weights were looked at when the run started, so that two causes are left: moments of the
    optimizer that are not finite, and steps that are too large.
    """
    for state in trainer.optimizer.state.values():
        if any(isinstance(x, Tensor) and not _is_finite(x) for x in state.values()):
            return "the optimizer's moments hold nan or inf; use another checkpoint or a backup"
    return otherwise


def broken_weight(model: nn.Module) -> str | None:
    """The name of the first weight that holds nan or inf; None if all are finite."""
    weights = {n: w for n, w in model.named_parameters() if w.is_floating_point()}
    finite = torch.stack([torch.isfinite(weight).all() for weight in weights.values()])
    named = zip(weights, finite.tolist(), strict=True)  # the device is waited for once
    return next((name for name, is_finite in named if not is_finite), None)


def _is_finite(x: Tensor) -> bool:
    return not x.is_floating_point() or bool(torch.isfinite(x).all())
