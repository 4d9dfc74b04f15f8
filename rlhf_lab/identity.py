"""Identity checks: by how much a sum or a recomputed entry misses, and what rounding explains."""

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Check:
    """One identity that a record must satisfy, and by how much it misses.

    Args:
        name: the identity in words.
        value: the size of the miss; nan when it cannot be computed, which counts as a failure.
        tolerance: the largest miss that rounding explains.
        ok: whether value <= tolerance.
    """

    name: str
    value: float
    tolerance: float
    ok: bool

    @classmethod
    def at_most(
        cls, name: str, value: float | int | Float[Tensor, ""], tolerance: float | int
    ) -> "Check":
        """A check that holds when the value is finite and not above the tolerance."""
        value, tolerance = float(value), float(tolerance)
        return cls(name, value, tolerance, math.isfinite(value) and value <= tolerance)
