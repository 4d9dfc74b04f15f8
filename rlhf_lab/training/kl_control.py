"""The KL penalty over the phases: its coefficient, and the reference that the KL is measured from.

Controllers set the coefficient; `reset_reference` makes the policy the reference every few phases.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

from rlhf_lab import functional as F
from rlhf_lab.config import RLHFArgs
from rlhf_lab.config.checks import POSITIVE, check_range
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import compare_with_reference
from rlhf_lab.models.build import freeze
from rlhf_lab.models.hooked_model import trainable_copy
from rlhf_lab.training.checkpoint import load_weights, weights
from rlhf_lab.training.overrides import warn_if_set
from rlhf_lab.training.rollout import Rollout

if TYPE_CHECKING:
    from rlhf_lab.training.trainer import RLHFTrainer

MAX_ERROR = 0.2
PREFIX = "reference."  # of the reference's weights in a checkpoint


@runtime_checkable
class KLController(Protocol):
    """Interface of a controller: the coefficient, and an update by the KL of each phase."""

    kl_coef: float

    def update(self, kl_per_sequence: float, n_sequences: int) -> float:
        """Update by a batch's mean KL, in nats per sequence; return the new coefficient."""


@dataclass
class FixedKLController:
    """A constant coefficient."""

    kl_coef: float

    def update(self, kl_per_sequence: float, n_sequences: int) -> float:
        return self.kl_coef


@dataclass
class AdaptiveKLController:
    """Raises the coefficient while the KL is above its target, and lowers it below.

    1. Take the relative error of the measured KL, limited to 20 % either way.
    2. Multiply the coefficient by 1 + error * n_sequences / horizon.

    e = clip(KL / target - 1, -0.2, 0.2);  beta <- beta * (1 + e * n / horizon)
    (Ziegler et al. 2019, arXiv 1909.08593, section 2.2)

    Args:
        kl_coef: the initial coefficient; `update` changes it.
        target: the target KL, in nats per sequence (not per token), greater than 0.
        horizon: sequences after which a full error multiplies the coefficient by 1.2 or 0.8.
    """

    kl_coef: float
    target: float
    horizon: int

    def __post_init__(self) -> None:
        check_range(POSITIVE, target=self.target, horizon=self.horizon)

    def update(self, kl_per_sequence: float, n_sequences: int) -> float:
        """Update by a batch's mean KL, in nats per sequence; return the new coefficient.

        Raises:
            ValueError: If the KL is nan or inf, which every later coefficient would inherit.
        """
        if not math.isfinite(kl_per_sequence):
            raise ValueError(f"kl_per_sequence must be finite, got {kl_per_sequence}.")
        error = min(max(kl_per_sequence / self.target - 1, -MAX_ERROR), MAX_ERROR)
        self.kl_coef *= 1 + error * n_sequences / self.horizon
        return self.kl_coef


def get_kl_controller(args: RLHFArgs, custom: Any = None) -> KLController:
    if custom is not None:
        if not (isinstance(custom, KLController) and custom.kl_coef >= 0):
            raise ConfigError(f"kl_controller={custom!r:.60} needs kl_coef >= 0 and update().")
        warn_if_set(args, "kl_controller kl_coef kl_target kl_horizon", "kl_controller= is set")
        return custom
    if args.kl_controller == "fixed":
        return FixedKLController(args.kl_coef)
    return AdaptiveKLController(args.kl_coef, args.kl_target, args.kl_horizon)


def reset_reference(trainer: "RLHFTrainer") -> None:
    """Make the policy the reference if `reset_reference_every` requires it in this phase."""
    every, phase = trainer.args.reset_reference_every, trainer.phase
    if every is not None and phase and phase % every == 0 and trainer.reference_phase != phase:
        reference = trainable_copy(trainer.policy.base_model)
        vars(trainer)["reference"] = freeze(reference, trainer.args.reference_device)
        trainer.reference_phase = phase


def reference_stats(trainer: "RLHFTrainer", rollout: Rollout) -> dict[str, float]:
    """Return the KL from the first reference and the phase of the newest; {} without resets."""
    kl, phase = kl_to_initial(trainer, rollout), trainer.reference_phase
    return {} if kl is None else {"kl_to_initial_per_sequence": kl, "reference_phase": phase}


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
        vars(trainer)["reference"] = freeze(reference, trainer.args.reference_device)
