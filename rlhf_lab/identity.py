"""Identity checks of records: the deviation of a sum or a recomputed value, and its tolerance."""

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Check:
    """One identity of a record, and its deviation.

    Args:
        name: a description of the identity.
        value: the deviation; nan, which fails, if it cannot be computed.
        tolerance: the largest deviation that rounding explains.
        ok: True if value <= tolerance.
    """

    name: str
    value: float
    tolerance: float
    ok: bool

    @classmethod
    def at_most(
        cls, name: str, value: float | int | Float[Tensor, ""], tolerance: float | int
    ) -> "Check":
        """Return a check that holds if the value is finite and at most the tolerance."""
        value, tolerance = float(value), float(tolerance)
        return cls(name, value, tolerance, math.isfinite(value) and value <= tolerance)
