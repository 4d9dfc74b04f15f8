"""KL controllers: the coefficient of the KL penalty, constant or adapted to a target KL."""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rlhf_lab.config import RLHFArgs

MAX_ERROR = 0.2


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
        target: the target KL, in nats per sequence (not per token).
        horizon: sequences after which a full error multiplies the coefficient by 1.2 or 0.8.
    """

    kl_coef: float
    target: float
    horizon: int

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


def get_kl_controller(args: RLHFArgs) -> KLController:
    if args.kl_controller == "fixed":
        return FixedKLController(args.kl_coef)
    return AdaptiveKLController(args.kl_coef, args.kl_target, args.kl_horizon)
