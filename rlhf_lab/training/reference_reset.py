"""Reference reset: the reference becomes the policy as it is after every so many phases."""

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
    """Begin a phase with the policy as reference, if `reset_reference_every` asks for that now.

    Callbacks and probes are given the new reference from here on. The first one is kept, for the KL
    from where the run began. Weights that are frozen, as below adapters, are shared.
    """
    every, phase = trainer.args.reset_reference_every, trainer.phase
    if every is None or phase == 0 or phase % every or trainer.reference_phase == phase:
        return
    trainer.reference = _copy_of(trainer.policy)
    trainer.reference_phase = phase


def _copy_of(policy: TransformerWithValueHead) -> HookedModel:
    """The policy's transformer with its adapters as they are, frozen and without hooks."""
    return trainable_copy(policy.base_model).requires_grad_(False).eval()


def age_of_reference(trainer: "RLHFTrainer") -> int | None:
    """After how many learning phases the policy became the reference; None where it stays."""
    return None if trainer.args.reset_reference_every is None else trainer.reference_phase


def kl_to_start(trainer: "RLHFTrainer", rollout: Rollout) -> float | None:
    """The exact KL of the policy that wrote a rollout from the first reference, per sequence.

    In nats; None where the reference stays. Call it before learning.
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
    """The mean of that over fresh rollouts, under its name; empty where the reference stays."""
    if trainer.args.reset_reference_every is None:
        return {}
    found = [kl_to_start(trainer, rollout) for rollout in rollouts]
    return {"kl_to_start_per_sequence": sum(found) / len(found)}


def reference_tensors(trainer: "RLHFTrainer") -> dict[str, Tensor]:
    """The weights of a reference that was reset, to be saved; none of the first one."""
    if not trainer.reference_phase:
        return {}
    weights = dict(trainer.reference.named_parameters())
    return {REFERENCE + name: weights[name] for name in _trained(trainer.policy)}


def _trained(policy: TransformerWithValueHead) -> list[str]:
    """The names of the transformer's weights that are trained, and so differ between phases."""
    named = policy.base_model.named_parameters()
    return [name for name, weight in named if weight.requires_grad]


def restore_reference(
    trainer: "RLHFTrainer", tensors: Mapping[str, Tensor], notes: Mapping[str, Any], path: Path
) -> None:
    """Put back the reference of the phase that was saved, which may be the first.

    Raises:
        RunError: it was reset, and the checkpoint does not hold it.
    """
    trainer.reference_phase = notes.get("reference_phase", 0)
    if not trainer.reference_phase:
        return
    reference = _copy_of(trainer.policy)
    weights = dict(reference.named_parameters())
    with torch.no_grad():
        for name in _trained(trainer.policy):
            saved = tensors.get(REFERENCE + name)
            if saved is None or (saved.shape, saved.dtype) != (
                weights[name].shape,
                weights[name].dtype,
            ):
                raise RunError(
                    f"{path} has no fitting {REFERENCE + name!r}, though the reference was reset "
                    f"in phase {trainer.reference_phase}; restore the file that the run wrote."
                )
            weights[name].copy_(saved)
    trainer.reference = reference
