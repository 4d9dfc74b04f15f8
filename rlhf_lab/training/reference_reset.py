"""Reference reset: the policy becomes the reference every few phases."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.errors import RunError
from rlhf_lab.models import TransformerWithValueHead, compare_with_reference
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.models.reference import trainable_copy
from rlhf_lab.training.rollout import Rollout

if TYPE_CHECKING:
    from rlhf_lab.training.trainer import RLHFTrainer

REFERENCE = "reference."


def reset_reference(trainer: "RLHFTrainer") -> None:
    """Make the policy the reference if `reset_reference_every` requires it in this phase.

    The first reference is kept, for the KL from the start of the run.
    """
    every, phase = trainer.args.reset_reference_every, trainer.phase
    if every is None or phase == 0 or phase % every or trainer.reference_phase == phase:
        return
    trainer.reference, trainer.reference_phase = _frozen_copy(trainer.policy), phase


def _frozen_copy(policy: TransformerWithValueHead) -> HookedModel:
    return trainable_copy(policy.base_model).requires_grad_(False).eval()


def age_of_reference(trainer: "RLHFTrainer") -> int | None:
    """Return the phase in which the policy became the reference; None if it never does."""
    return None if trainer.args.reset_reference_every is None else trainer.reference_phase


def kl_to_start(trainer: "RLHFTrainer", rollout: Rollout) -> float | None:
    """Compute the exact KL per sequence from the first reference, before learning.

    None if the reference is never reset.
    """
    if trainer.args.reset_reference_every is None:
        return None
    args, samples, kl = trainer.args, rollout.samples, rollout.kl
    if trainer.reference is not trainer.first_reference:
        settings = args.temperature, args.rows_at_once, trainer.forward
        first = trainer.first_reference
        kl = compare_with_reference(trainer.policy, first, samples, *settings).kl
    return F.kl_per_sequence(kl, samples.mask).mean().item()


def final_kl_to_start(trainer: "RLHFTrainer", rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean KL from the first reference; empty if the reference is never reset."""
    if trainer.args.reset_reference_every is None:
        return {}
    values = [kl_to_start(trainer, rollout) for rollout in rollouts]
    return {"kl_to_initial_per_sequence": sum(values) / len(values)}


def reference_tensors(trainer: "RLHFTrainer") -> dict[str, Tensor]:
    """Return the weights of a reference that was reset, to save; empty for the first one."""
    if not trainer.reference_phase:
        return {}
    weights = dict(trainer.reference.named_parameters())
    return {REFERENCE + name: weights[name] for name in _trained(trainer.policy)}


def _trained(policy: TransformerWithValueHead) -> list[str]:
    named = policy.base_model.named_parameters()
    return [name for name, weight in named if weight.requires_grad]


@torch.no_grad()
def restore_reference(
    trainer: "RLHFTrainer", tensors: Mapping[str, Tensor], notes: Mapping[str, Any], path: Path
) -> None:
    """Restore the reference of the phase that was saved.

    Raises:
        RunError: If the checkpoint lacks the weights of a reference that was reset.
    """
    trainer.reference_phase = notes.get("reference_phase", 0)
    if not trainer.reference_phase:
        return
    reference = _frozen_copy(trainer.policy)
    weights = dict(reference.named_parameters())
    for name in _trained(trainer.policy):
        saved, weight = tensors.get(REFERENCE + name), weights[name]
        if saved is None or (saved.shape, saved.dtype) != (weight.shape, weight.dtype):
            raise RunError(
                f"{path} has no fitting {REFERENCE + name!r}, though the reference was reset in "
                f"phase {trainer.reference_phase}. Restore the file that the run wrote."
            )
        weight.copy_(saved)
    trainer.reference = reference
