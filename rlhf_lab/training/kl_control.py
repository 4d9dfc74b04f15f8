"""KL controllers: the weight of the KL penalty, constant or adapted to a target KL."""

import functools
import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError

MAX_ERROR = 0.2


@runtime_checkable
class KLController(Protocol):
    """What the trainer asks for the coefficient, and tells the KL of each phase."""

    kl_coef: float

    def update(self, kl_per_sequence: float, n_sequences: int) -> float:
        """Take in a batch's mean KL, in nats per sequence, and return the new coefficient."""


@dataclass
class FixedKLController:
    """The same coefficient throughout."""

    kl_coef: float

    def update(self, kl_per_sequence: float, n_sequences: int) -> float:
        """Return the coefficient, whatever the KL was."""
        return self.kl_coef


@dataclass
class AdaptiveKLController:
    """Raises the coefficient while the KL is above its target, and lowers it while it is below.

    1. Take the relative error of the measured KL, limited to 20 % either way.
    2. Multiply the coefficient by 1 + error * n_sequences / horizon.

    e = clip(KL / target - 1, -0.2, 0.2);  beta <- beta * (1 + e * n / horizon)
    (Ziegler et al. 2019, arXiv 1909.08593, section 2.2)

    Args:
        kl_coef: the coefficient to start from; it is changed by `update`.
        target: the KL to hold, in nats per sequence (not per token: that is another number).
        horizon: sequences over which a full error would multiply the coefficient by 1.2 or 0.8.
    """

    kl_coef: float
    target: float
    horizon: int

    def update(self, kl_per_sequence: float, n_sequences: int) -> float:
        """Take in a batch's mean KL, in nats per sequence, and return the new coefficient.

        Raises ValueError for a KL of nan or inf, which every later coefficient would inherit.
        """
        if not math.isfinite(kl_per_sequence):
            raise ValueError(f"kl_per_sequence is {kl_per_sequence}; look for what made it so.")
        error = min(max(kl_per_sequence / self.target - 1, -MAX_ERROR), MAX_ERROR)
        self.kl_coef *= 1 + error * n_sequences / self.horizon
        return self.kl_coef


def _answer(controller: type, **here: str) -> None:
    """Let a controller say what a keyword of torchrl's or TRL's is called here, in place."""
    init = controller.__init__

    @functools.wraps(init)
    def __init__(self: Any, *values: Any, **named: Any) -> None:
        unknown = next((name for name in named if name in here), None)
        if unknown is not None:
            raise ConfigError(f"{controller.__name__} has no {unknown!r}; {here[unknown]}.")
        init(self, *values, **named)

    controller.__init__ = __init__


NO_MODEL = "leave it out, and read the coefficient where it is: trainer.kl_controller.kl_coef"
_answer(FixedKLController, init_kl_coef="here it is kl_coef", model=NO_MODEL)
_answer(AdaptiveKLController, init_kl_coef="here it is kl_coef", model=NO_MODEL)


def get_kl_controller(args: RLHFArgs) -> KLController:
    """The controller that `args.kl_controller` names, at `args.kl_coef`."""
    if args.kl_controller == "fixed":
        return FixedKLController(args.kl_coef)
    return AdaptiveKLController(args.kl_coef, args.kl_target, args.kl_horizon)
