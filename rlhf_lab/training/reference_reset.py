"""Reference reset: the policy becomes the reference every few phases."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.models import compare_with_reference
from rlhf_lab.models.build import freeze
from rlhf_lab.models.hooked_model import trainable_copy
from rlhf_lab.training.checkpoint import load_weights, weights
from rlhf_lab.training.rollout import Rollout

if TYPE_CHECKING:
    from rlhf_lab.training.trainer import RLHFTrainer

PREFIX = "reference."  # of the reference's weights in a checkpoint


def reset_reference(trainer: "RLHFTrainer") -> None:
    """Make the policy the reference if `reset_reference_every` requires it in this phase."""
    every, phase = trainer.args.reset_reference_every, trainer.phase
    if every is not None and phase and phase % every == 0 and trainer.reference_phase != phase:
        reference = trainable_copy(trainer.policy.base_model)
        trainer.reference = freeze(reference, trainer.args.reference_device)
        trainer.reference_phase = phase


def age_of_reference(trainer: "RLHFTrainer") -> int | None:
    """Return the phase in which the policy became the reference; None if it never does."""
    return None if trainer.args.reset_reference_every is None else trainer.reference_phase


def kl_to_initial(trainer: "RLHFTrainer", *rollouts: Rollout) -> float | None:
    """Compute the mean exact KL per sequence from the first reference; None without resets."""
    if trainer.args.reset_reference_every is None:
        return None
    args, first, values = trainer.args, trainer.first_reference, []
    for rollout in rollouts:
        samples, kl = rollout.samples, rollout.kl
        if trainer.reference is not first:
            settings = args.temperature, args.rows_at_once, trainer.forward
            kl = compare_with_reference(trainer.policy, first, samples, *settings).kl
        values.append(F.kl_per_sequence(kl, samples.mask).mean().item())
    return sum(values) / len(values)


def reference_tensors(trainer: "RLHFTrainer") -> dict[str, Tensor]:
    """Return the weights of a reference that was reset, to save; empty for the first one."""
    if not trainer.reference_phase:
        return {}
    reference = dict(trainer.reference.named_parameters())
    return {PREFIX + name: reference[name] for name in weights(trainer.policy.base_model)}


def restore_reference(
    trainer: "RLHFTrainer", tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], path: Path
) -> None:
    trainer.reference_phase = metadata["reference_phase"]
    if trainer.reference_phase:
        reference = trainable_copy(trainer.policy.base_model)
        load_weights(reference, tensors, path, PREFIX)
        trainer.reference = freeze(reference, trainer.args.reference_device)
